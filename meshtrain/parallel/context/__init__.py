"""Context parallelism: sequences lie in parts on the ranks of cp, and attention sees all of them.

attention: what the attention and the masks of a model do then.
blocks: blocks that compute on full sequences.
collectives: the exchange of heads, keys and values.
columns: which tokens of a sequence a rank has.
loss: the loss of a class, from the logits of a part of the sequences.
mixing: the blocks of a model that need full sequences, found by a tiny copy.
parts: the parts of a batch, and the hooks of a stage.
positions: which positions a class gives tokens, found by a tiny copy.

Source: DeepSpeed-Ulysses (arXiv:2309.14509) for the exchange of heads, Llama 3 (arXiv:2407.21783,
section 3.3.2) for gathered keys and values and for a part from each end of the sequence.
"""
