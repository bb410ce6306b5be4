"""Expert parallelism: experts lie whole on the ranks of ep, and tokens travel to them and back.

Modules:
    dispatch: the exchange of tokens around stacked experts.
    stacks: the stacked experts of a model.
    trial: whether experts compute rows of single choices as the exchange needs it.
    use: how many tokens each expert gets.
"""
