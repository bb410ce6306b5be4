"""The real step of any process of a run, on fake tensors, without an accelerator.

optimizer: the optimizer over fake tensors.
pipeline: all processes that differ.
profile: what a process does in a step, with any number of microbatches.
rank: one process.
recorder: sees every operator.
"""
