"""Cut an unmodified Hugging Face model into pipeline stages.

Modules:
    balance: the number of decoder layers of each stage.
    dataflow: tracks which tensors of a forward pass are computed from which others.
    hooks: disables the hooks of a model while it is probed, and copies models with hooks.
    probe: finds the decoder layers of a model, and the modules called before and after them.
    stage: the stages, and what cuts a model into them.
    stubs: modules without parameters that replace the modules of other stages.
"""
