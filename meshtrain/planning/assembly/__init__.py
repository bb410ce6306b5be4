"""The steps of all processes of a run, put together from the simulations of a few.

effects: what decides what a pass does, besides its stage.
expansion: the step of all layers of a process, from that of a few.
growth: what happens outside the passes of microbatches, for any number of layers.
layers: a few layers that show what all layers of a stage do.
microbatches: the step with many microbatches, from that with a few of them.
outline: what the stages of a run consist of.
pipeline: all processes that differ.
processes: which processes of a pp rank hold the same.
received: the memory for messages between stages.
shorter: a pipeline of those pp ranks alone that differ.
task: one process, with a few of its layers.
"""
