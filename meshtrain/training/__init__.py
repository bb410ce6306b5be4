"""Training: the loop of a run, its checkpoints and checks, and the parts that other loops share.

Set up a run
    run: a training run from its configuration to its end.
    resolve: the model and the plan of a run, and the check that they fit together.
    report: the tables of a resolved run.
    files: names of the files of a run directory.
    directory: the files of the run directory, and the check that they belong to the run.
    lock: the lock that keeps other runs out of the folders of a run.
    beginning: the check that a run without a checkpoint may begin at step 0.
    identity: what a checkpoint must agree with to resume the run.
    build: build everything that a run works with.

Train
    loop: read batches, step, evaluate, save, and notify the hooks.
    step: one optimizer step.
    loss: next-token cross-entropy, also over a sharded vocabulary.
    own_loss: a loss of the program's own.
    run_loss: the loss of a run, chosen by its tables.
    weighted_loss: cross-entropy with weights of tokens.
    preference: losses of judged answers.
    objective: cross-entropy with label smoothing and z-loss.
    distillation: a frozen teacher, and the loss of a model that learns from it.
    loss_scale: dynamic loss scaling for float16.
    gradients: complete the gradients, and compute their norm.
    optim: the optimizer and its learning rate.
    parameter_groups: the groups of an optimizer's parameters.
    per_parameter: optimizers whose steps update each parameter by itself.
    fused_adamw: the step of AdamW by torch's fused kernel.
    rounded_adamw: AdamW with moments in bfloat16.
    blockwise_adamw: AdamW with moments in 8 bits. dynamic_map: how they are rounded.
    lion, muon, adafactor, schedule_free: these optimizers.
    matrix_exchange: brings the parts of matrices together for Muon.
    sharded_sums: sums over the dimensions of sharded parameters for Adafactor.
    noise_scale: how noisy the gradients are.
    weight_average: an exponential moving average of the weights.
    history: skipped and bad steps of a run.
    checksums: checksums of parameters.
    self_check: checks of parameters, inputs and gradients.

Hooks
    hooks: base class of hooks, and the state that is passed to them.
    evaluators: what a run asks of its model between steps.
    logging_hooks: built-in hooks for metrics and printed lines.
    metrics: write metrics.jsonl and TensorBoard's events.
    epoch_averages: averages of metrics over the steps of an epoch.
    trackers: pass the metrics on to Weights & Biases, MLflow and trackio.

Checkpoints
    run_checkpoints: resume from, save and go back to a checkpoint of a run.
    frozen_base: the frozen model beside which adapters train, in a checkpoint.
    saving: checkpoints of a program with its own loop.
    state: the state that survives a restart.
    optimizer_state: the tensors that an optimizer keeps for each parameter.
    saved_optimizer: class, options and groups of an optimizer in a manifest.
    same_model: the check that a checkpoint belongs to the model of this program.
"""
