"""The losses of routers, and the biases with which they select experts.

formulas: the losses of a class, as functions of the logits of one router.
trial: whether what transformers records of routers are logits.
loss: these losses in training.
"""
