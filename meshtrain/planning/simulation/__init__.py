"""The real step of one process of a run, on fake tensors, without an accelerator.

building: the models of a run, and what a step works with.
fewer_layers: a model with some of its layers left out.
models: the model of a run, built once.
no_passes: a pipeline that fills in gradients without a pass.
optimizer: the optimizer over fake tensors.
profile: what a process does in a step.
rank: one process.
recorder: sees every operator.
run: what a simulation needs to know of a run.
"""
