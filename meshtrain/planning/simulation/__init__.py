"""The real step of any process of a run, on fake tensors, without an accelerator.

expansion: the step of all layers of a process, from that of a few.
fewer_layers: a model with some of its layers left out.
growth: what happens outside the passes of microbatches, for any number of layers.
layers: a few layers that show what all layers of a stage do.
no_passes: a pipeline that fills in gradients without a pass.
optimizer: the optimizer over fake tensors.
outline: what the stages of a run consist of.
pipeline: all processes that differ.
processes: which processes of a pp rank hold the same.
profile: what a process does in a step, with any number of microbatches.
rank: one process.
recorder: sees every operator.
shorter: a pipeline of those pp ranks alone that differ.
task: one process, with a few of its layers.
"""
