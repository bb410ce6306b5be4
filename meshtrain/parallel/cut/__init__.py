"""Cut an unmodified Hugging Face model into pipeline stages.

Modules:
    balance: the number of decoder layers of each stage.
    borders: what each stage receives and sends.
    cutter: cuts a model into stages, and checks that each runs.
    hooks: disables the hooks of a model while it is probed, and copies models with hooks.
    kinds: runs only two layers of each kind on the meta device.
    meta: lets models run on the meta device where they read values.
    nest: reads and replaces tensors in nests of arguments and results.
    originals: puts tied weights of other stages in their places while a stage is initialized.
    probe: finds the decoder layers of a model, and traces its forward pass.
    stage: one stage, with its part of the model.
    stubs: modules without parameters that replace the modules of other stages.
    trace: what the parts of a model pass to each other in one forward pass.
"""
