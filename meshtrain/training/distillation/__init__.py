"""Knowledge distillation: a frozen teacher beside the model that trains.

teacher: a frozen model from a folder, laid out on the mesh of the run.
frozen: the teacher with its weights.
passes: its forward passes, which give the logits of the microbatches of a step.
divergence: the Kullback-Leibler divergence, over logits that may be sharded.
loss: the loss of the run.
"""
