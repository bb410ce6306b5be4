"""Build everything that a run works with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshtrain import console
from meshtrain.checkpoint.manifest import SavedReference, SavedTeacher
from meshtrain.checkpoint.saver import Saver
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.config.run import RunConfig
from meshtrain.data.samples.dataset import Dataset
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.account import flops_per_token
from meshtrain.parallel.head.chunks import LossFunction
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import init_mesh
from meshtrain.runtime.process import Process
from meshtrain.training.directory import checkpoints_root
from meshtrain.training.evaluators import Evaluator
from meshtrain.training.frozen_base import FrozenBase
from meshtrain.training.gradients import NO_LAYERS, layers_of
from meshtrain.training.history import StepHistory
from meshtrain.training.hooks import Hook, Hooks, RunState
from meshtrain.training.identity import Identity
from meshtrain.training.lock import RunLock
from meshtrain.training.logging_hooks import LinesHook, MetricsHook
from meshtrain.training.loss import TokenLoss
from meshtrain.training.loss_scale import build_loss_scale
from meshtrain.training.noise_scale import NoiseScale
from meshtrain.training.optim import build_learning_rate, build_optimizer
from meshtrain.training.own_loss import build_own_loss
from meshtrain.training.run_loss import build_run_loss
from meshtrain.training.self_check import FirstStepCheck
from meshtrain.training.step import StepContext, no_inspection
from meshtrain.training.trackers.hook import TrackerHook
from meshtrain.training.weight_average import WeightAverage, build_average


@dataclass(frozen=True)
class Run:
    """A run with everything that was built for it.

    Attributes:
        identity: the configuration of the run, resolved, and its data.
        dataset: the samples and their order.
        process: this process, with its device and the requests to stop.
        context: what each step works with.
        hooks: receive the events of the run, and hold the state that is passed to them.
        saver: writes the checkpoints of the run.
        lock: keeps other runs out of the folders of this one.
        base: the frozen model of adapters.
        evaluators: evaluate the model between steps.
        average: of the weights; None if the run has none.
        reference: which reference the data have; None: the loss needs none.
        teacher: which weights the teacher has; None: there is none.
    """

    identity: Identity
    dataset: Dataset
    process: Process
    context: StepContext
    hooks: Hooks
    saver: Saver
    lock: RunLock
    base: FrozenBase
    evaluators: Sequence[Evaluator]
    average: WeightAverage | None
    reference: SavedReference | None = None
    teacher: SavedTeacher | None = None
    _flops: dict[int, float] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        """Return the configuration of the run."""
        return self.identity.config

    @property
    def pipeline(self) -> Pipeline:
        """Return the part of the model on this process."""
        return self.context.pipeline

    @property
    def state(self) -> RunState:
        """Return the state that survives a restart and that is passed to hooks."""
        return self.hooks.state

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps after which the run is done."""
        return self.state.num_steps

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the FLOPs of the model per token, forward and backward.

        They are counted once per length of the sequences.
        """
        if sequence_length not in self._flops:
            self._flops[sequence_length] = flops_per_token(self.identity.resolved.model, sequence_length)
        return self._flops[sequence_length]


def build_run(
    identity: Identity,
    dataset: Dataset,
    num_steps: int,
    process: Process,
    lock: RunLock,
    hooks: Sequence[Hook],
    evaluators: Sequence[Evaluator],
    loss: LossFunction | None,
) -> Run:
    """Build a run whose parameters have no values yet. Collective.

    Args:
        hooks: the user's hooks; they are called after the built-in ones.
        evaluators: evaluate the model between steps.
        loss: the program's own; None: that of the configuration.
    """
    config = identity.config
    context = _build_step_context(identity, num_steps, process, loss)
    # What a checkpoint has: the stock configuration may name other tokens.
    context.pipeline.set_generation_config(identity.generation_config())
    average = build_average(context.pipeline, config.ema)
    if average is not None:
        context = replace(context, after_update=average.update)
    state = RunState(
        model=context.pipeline,
        optimizer=context.optimizer,
        config=config.model_copy(update={"plan": identity.plan}),
        num_steps=num_steps,
        # A loss of answers says nothing about the frequencies of tokens.
        unigram_entropy=math.nan if config.preference.loss else identity.data.unigram_entropy_nats,
        stop=process.stop,
    )
    trackers = [TrackerHook(name) for name in config.logging.trackers if name != "tensorboard"]
    kept = config.checkpoint
    saver = Saver(
        checkpoints_root(config),
        Retention(newest=kept.keep, every=kept.keep_every, best=kept.keep_best),
        in_background=kept.in_background,
    )
    return Run(
        identity=identity,
        dataset=dataset,
        process=process,
        context=context,
        hooks=Hooks(state, (MetricsHook(), *trackers, LinesHook(), lock, *hooks)),
        saver=saver,
        lock=lock,
        base=FrozenBase(config),
        evaluators=evaluators,
        average=average,
    )


def _build_loss(pipeline: Pipeline, identity: Identity, process: Process, own: LossFunction | None) -> TokenLoss:
    if own is not None:
        return build_own_loss(pipeline, own)
    config, teacher = identity.config, None
    if identity.resolved.teacher is not None:
        teacher = identity.resolved.teacher.build(pipeline, process.device)
    return build_run_loss(
        pipeline,
        config.objective,
        config.preference,
        has_weights=config.data.has_weights,
        distillation=config.distillation,
        teacher=teacher,
    )


def _build_step_context(identity: Identity, num_steps: int, process: Process, loss: LossFunction | None) -> StepContext:
    config, plan = identity.config, identity.plan
    if plan.shard.offload == "cpu" and process.device.type == "cpu":
        console.line(
            "shard.offload = 'cpu' changes nothing here: without an accelerator, everything is already in host memory"
        )
    pipeline = build_pipeline(
        identity.resolved.model,
        init_mesh(plan.mesh, process.device.type),
        plan,
        micro_batch_size=identity.resolved.batch.micro_batch_size,
        seed=config.seed,
        device=process.device,
        router=config.router,
        adapters=identity.resolved.adapters,
        base_is_elsewhere=bool(identity.resolved.adapters),
        packs_base=config.lora.base == "nf4",
    )
    return StepContext(
        pipeline=pipeline,
        loss=_build_loss(pipeline, identity, process, loss),
        optimizer=build_optimizer(pipeline, config.optimizer),
        learning_rate=build_learning_rate(config.learning_rate, config.optimizer.learning_rate, num_steps),
        max_gradient_norm=config.optimizer.max_gradient_norm,
        loss_scale=build_loss_scale(plan.precision),
        history=StepHistory(config.bad_steps),
        layer_norms=layers_of(pipeline) if config.logging.layer_norms else NO_LAYERS,
        each_expert=config.logging.expert_tokens,
        noise_scale=NoiseScale(config.logging.noise_scale_every),
        inspect=FirstStepCheck(pipeline) if config.self_checks else no_inspection,
    )
