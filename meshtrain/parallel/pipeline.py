"""The parallel model for the training step: one interface, with or without a pipeline schedule."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from meshtrain.compat.distributed import TorchSchedule
from meshtrain.compat.nn import saved_buffers
from meshtrain.compat.schedules import build_schedule
from meshtrain.config.mesh import PP, TP
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ModelError, Problem
from meshtrain.models.adapters import initialize_adapters, without_adapters
from meshtrain.models.dora import initialize_magnitudes
from meshtrain.models.fused import FusedParameter
from meshtrain.models.initialize import initialize_weights
from meshtrain.models.packed import clear_packed
from meshtrain.parallel.context.parts import ContextParallel
from meshtrain.parallel.cut.originals import originals_in_place
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.experts.use import ExpertUse
from meshtrain.parallel.head.chunks import ChunkedHead, LossFunction, take_loss
from meshtrain.parallel.head.size import loss_dtype
from meshtrain.parallel.randomness import ForwardStreams
from meshtrain.parallel.recorded_stage import RecordedStage
from meshtrain.parallel.replicas import Replicas
from meshtrain.parallel.rotary_length import RotaryLength
from meshtrain.parallel.routers.loss import RouterLoss
from meshtrain.parallel.schedule import ForwardMessages
from meshtrain.parallel.sent_messages import SentMessages
from meshtrain.parallel.shard import prepare_backward, reshard
from meshtrain.parallel.stage_attention import StageAttention
from meshtrain.parallel.tensor.collectives import shard_width
from meshtrain.parallel.tensor.region import sequence_is_split
from meshtrain.parallel.tied import TiedCopies
from meshtrain.runtime.activity import Activity
from meshtrain.runtime.mesh import all_reduce_over, axis_size

NOTHING_TRAINS = Problem("every parameter is frozen, so there is nothing to train", "set requires_grad_(True) on some")


@dataclass(frozen=True)
class Pipeline:
    """The stages that this process holds, and their connections to the other processes.

    Attributes:
        stages: in ascending order; one, unless the schedule has several per process.
        mesh: all processes.
        plan: resolved.
        micro_batch_size: in sequences.
        parameter_names: FQNs of the full model. A tied weight appears once, and a fused one as its
            parts.
        trained_names: those of `parameter_names` that are not frozen.
        fused: the stock parameters that are kept in parts.
        summed_over_tp: names of the parameters whose gradients are partial over tp.
        logits_are_sharded: whether the last stage returns to each process of a tp group only its
            part of the vocabulary.
        tied_copies: the tied weights whose two ends are on different stages.
        replicas: sums gradients over full copies of the model.
        streams: seeds for dropout.
        attention: of the stages; None if it is the model's own.
        context: what this process does with its part of the sequences; None without cp.
        router_loss: the losses of routers, if the model or the run asks for them.
        expert_use: how many tokens each expert gets.
        rotary_length: the longest sequence of a batch, if rotary frequencies depend on it.
        peers: the processes of this pipeline, for the messages between stages; None without a
            pipeline. It is not the group of the pp axis. Collectives of that axis must not queue
            behind messages between two processes, and must not be counted with them.
        head: computes the loss of this process's microbatches in chunks; None if all logits are
            computed at once, and on processes without the last stage.
        base_is_elsewhere: whether checkpoints hold only what trains.
        packs_base: whether frozen projections have packed weights.
        activity: what this process computes at present, for readers outside the pipeline.
    """

    stages: tuple[Stage, ...]
    mesh: DeviceMesh
    plan: ParallelPlan
    micro_batch_size: int
    parameter_names: frozenset[str]
    trained_names: frozenset[str]
    fused: tuple[FusedParameter, ...]
    summed_over_tp: frozenset[str]
    logits_are_sharded: bool
    tied_copies: TiedCopies
    replicas: Replicas
    streams: ForwardStreams
    attention: StageAttention | None
    context: ContextParallel | None
    router_loss: RouterLoss
    expert_use: ExpertUse
    rotary_length: RotaryLength
    peers: dist.ProcessGroup | None
    head: ChunkedHead | None = None
    base_is_elsewhere: bool = False
    packs_base: bool = False
    activity: Activity = field(default_factory=Activity)
    _schedules: dict[tuple[int, ...], "_Schedule"] = field(default_factory=dict)

    @property
    def has_first_stage(self) -> bool:
        """Return whether this process holds the embedding."""
        return self.stages[0].is_first

    @property
    def has_last_stage(self) -> bool:
        """Return whether this process computes the loss."""
        return self.stages[-1].is_last

    @property
    def num_stages(self) -> int:
        """Return the number of stages on the full pp axis."""
        return self.stages[0].num_stages

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of this process once, with its FQN.

        The copy of a tied weight on another stage has an FQN of its own.
        """
        for stage in self.stages:
            yield from stage.named_parameters()

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the entries of `named_parameters` that are not frozen."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this process that belong to the weights, such as a router's bias.

        A buffer outside of the layers exists on every stage. It is yielded once for each stage that
        this process holds.
        """
        for stage in self.stages:
            for owner, module in stage.model.named_modules():
                for name, buffer in saved_buffers(module):
                    yield f"{owner}.{name}" if owner else name, buffer

    def initialize(self, seed: int) -> None:
        """Fill all parameters and buffers with initial values, the same on every mesh. Collective.

        Args:
            seed: of the run.

        Raises:
            ModelError: for a parameter that has no initial value in transformers.
        """
        for stage in self.stages:
            with originals_in_place(stage.model, stage.copies_of_far_originals()):
                names = {name: stage.tied.get(name, name) for name, _ in stage.named_parameters()}
                initialize_weights(stage.model, seed=seed, names=names)
            clear_packed(stage.model)
            with without_adapters(stage.model) as layers:
                initialize_magnitudes(stage.model, layers)

    def initialize_adapters(self, seed: int) -> None:
        """Fill the LoRA adapters alone with initial values, the same on every mesh. Collective.

        The model has its values, because magnitudes (DoRA) are computed from them.

        Args:
            seed: of the run.
        """
        for stage in self.stages:
            with without_adapters(stage.model) as layers:
                initialize_adapters(stage.model, layers, seed=seed)
                initialize_magnitudes(stage.model, layers)

    def set_generation_config(self, config: GenerationConfig) -> None:
        """Set the defaults that `generate` uses."""
        for stage in self.stages:
            stage.model.generation_config = config

    def canonical_names(self) -> dict[str, str]:
        """Return name -> FQN in the checkpoint.

        The two differ only for the copy of a tied weight on another stage.
        """
        tied = {copy: source for stage in self.stages for copy, source in stage.tied.items()}
        return {name: tied.get(name, name) for name, _ in self.named_parameters()}

    def owned_parameters(self) -> dict[str, nn.Parameter]:
        """Return FQN -> parameter, without the copies of tied weights on other stages.

        Over all stages, each parameter of the model appears exactly once.
        """
        owned = {}
        for stage in self.stages:
            held = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
            for name, parameter in stage.named_parameters():
                # Both ends of a tie may be on this stage, and the copy may come first.
                fqn = stage.tied.get(name, name)
                if fqn in held:
                    owned[fqn] = parameter
        return owned

    def prepare(self, labels: Tensor) -> None:
        """Build what the first step with a shape of batches builds. Collective over the pipeline.

        A run need not call it. A simulation does, because other steps do not send these messages,
        and because its processes cannot ask each other whether any parameter trains.

        Args:
            labels: of a batch (local_batch, seq).
        """
        if self.num_stages > 1:
            with self._in_parts({"input_ids": labels}, labels) as (_, part):
                _schedule_for(self, part)

    def forward_backward(
        self, batch: Mapping[str, Tensor], loss_function: LossFunction, *, loss_scale: float = 1.0
    ) -> Tensor:
        """Run all microbatches of a step, forward and backward.

        Gradients are summed over microbatches and over the data-parallel axes.

        Args:
            batch: `input_ids` and `labels` (local_batch, seq), and further inputs of the model with
                the same first dimension. Every process of a pipeline passes the same batch.
            loss_function: of this step. It divides by the number of tokens and applies the loss
                scale.
            loss_scale: the same scale, which the auxiliary loss of routers also needs.

        Returns:
            () the sum of the losses of this process's microbatches; zero if this process does not
            hold the last stage.

        Raises:
            ModelError: if every parameter is frozen.
        """
        inputs, labels = _split_off_labels(batch)
        loss_function = self._loss_of_outputs(loss_function)
        num_microbatches = labels.shape[0] // self.micro_batch_size
        self.replicas.begin_step(num_microbatches)
        self.router_loss.begin_step(num_microbatches, loss_scale)
        run = _run_schedule if self.num_stages > 1 else _run_one_stage
        with self._batch(inputs, labels) as parts:
            return run(self, *parts, loss_function)

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Tensor], loss_function: LossFunction) -> Tensor:
        """Run all microbatches forward only, in evaluation mode.

        Arguments and result are those of `forward_backward`.
        """
        inputs, labels = _split_off_labels(batch)
        loss_function = self._loss_of_outputs(loss_function)
        modes = [stage.model.training for stage in self.stages]
        for stage in self.stages:
            stage.model.eval()
        try:
            with self._batch(inputs, labels) as parts:
                return _run_forward(self, *parts, loss_function)
        finally:
            for stage, mode in zip(self.stages, modes, strict=True):
                stage.model.train(mode)
                reshard(stage.model)

    @contextmanager
    def _batch(self, inputs: dict[str, Tensor], labels: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Compute a batch inside the block, of which the stages know the longest row and documents.

        Yields:
            As `_in_parts`.
        """
        documents = nullcontext() if self.attention is None else self.attention.of(inputs)
        with self.rotary_length.of(inputs), documents, self._in_parts(inputs, labels) as parts:
            yield parts

    @contextmanager
    def _in_parts(self, inputs: dict[str, Tensor], labels: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Compute this process's part of the sequences inside the block.

        Yields:
            The inputs of the stages for that part, and its labels.
        """
        context = nullcontext((inputs, labels)) if self.context is None else self.context.of(inputs, labels)
        with context as (own, targets):
            # The class computes the loss of chunks from the labels.
            yield own if self.head is None else {**own, "labels": targets}, targets

    def _loss_of_outputs(self, loss_function: LossFunction) -> LossFunction:
        """Return the loss of what the last stage returns: logits, or the loss of its chunks."""
        if self.head is None:
            return loss_function
        self.head.loss_function = loss_function
        return take_loss


def _split_off_labels(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    inputs = dict(batch)
    return inputs, inputs.pop("labels")


def _run_one_stage(
    pipeline: Pipeline, inputs: dict[str, Tensor], labels: Tensor, loss_function: LossFunction
) -> Tensor:
    (stage,) = pipeline.stages
    total = torch.zeros((), dtype=torch.float64, device=labels.device)
    microbatches = list(_microbatches(inputs, labels, pipeline.micro_batch_size))
    for number, (microbatch, targets) in enumerate(microbatches, start=1):
        prepare_backward(stage.model, pipeline.plan.shard, is_last=number == len(microbatches))
        pipeline.activity.enter("forward", stage.index, number - 1)
        loss = loss_function(stage.compute((), **microbatch), targets)
        if not loss.requires_grad:
            raise ModelError(NOTHING_TRAINS)
        pipeline.activity.enter("backward", stage.index, number - 1)
        loss.backward()
        total += loss.detach()
    return total


def _run_schedule(pipeline: Pipeline, inputs: dict[str, Tensor], labels: Tensor, loss_function: LossFunction) -> Tensor:
    if tuple(labels.shape) not in pipeline._schedules:
        _check_trains(pipeline, labels.device)
    schedule = _schedule_for(pipeline, labels)
    schedule.loss.function = loss_function
    losses: list[Tensor] = []
    pipeline.activity.enter("before passes")
    with schedule.sent or nullcontext():
        schedule.torch_schedule.step(
            *((inputs["input_ids"],) if pipeline.has_first_stage else ()),
            target=labels if pipeline.has_last_stage else None,
            losses=losses if pipeline.has_last_stage else None,
            return_outputs=False,
            **inputs,  # type: ignore[arg-type]
        )
    total = torch.zeros((), dtype=torch.float64, device=labels.device)
    return total + torch.stack([loss.detach() for loss in losses]).sum() if losses else total


class _LossOfStep:
    """A function that calls the loss function of the present step.

    A torch schedule takes one loss function for all steps, and `step(loss_kwargs=...)` needs
    torch 2.13.
    """

    function: LossFunction

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.function(output, target)


class _Schedule(NamedTuple):
    """The torch schedule for one shape of a batch, the loss that it calls, and what it sends."""

    torch_schedule: TorchSchedule
    loss: _LossOfStep
    sent: SentMessages | None


def _schedule_for(pipeline: Pipeline, labels: Tensor) -> _Schedule:
    # A torch stage has one static shape, so each shape of a batch needs its own schedule.
    shape = tuple(labels.shape)
    if shape not in pipeline._schedules:
        loss = _LossOfStep()
        # 1F1B waits for each message itself, together with one that it receives.
        waits, peers = pipeline.plan.pipeline.schedule == "1F1B", pipeline.peers
        sent = None if waits or peers is None else SentMessages(peers, labels.device)
        pipeline._schedules[shape] = _Schedule(_build_schedule(pipeline, labels, loss, sent), loss, sent)
    return pipeline._schedules[shape]


def _check_trains(pipeline: Pipeline, device: torch.device) -> None:
    # A stage assumes that its input needs a gradient, even if no earlier stage trains. So one stage
    # alone cannot detect that nothing trains.
    idle = torch.tensor(float(not any(True for _ in pipeline.trainable_parameters())), device=device)
    if all_reduce_over(idle, pipeline.mesh, [PP], dist.ReduceOp.MIN).item():
        raise ModelError(NOTHING_TRAINS)


def _build_schedule(
    pipeline: Pipeline, labels: Tensor, loss_function: LossFunction, sent: SentMessages | None
) -> TorchSchedule:
    schedule_class = get_schedule_class(pipeline.plan.pipeline.schedule)
    stages = [_torch_stage(pipeline, stage, labels, sent) for stage in pipeline.stages]
    return build_schedule(
        schedule_class,
        stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0],
        n_microbatches=labels.shape[0] // pipeline.micro_batch_size,
        loss_fn=loss_function,
        # The loss is already divided by the global token count, and torch would divide again.
        scale_grads=False,
    )


def _torch_stage(pipeline: Pipeline, stage: Stage, labels: Tensor, sent: SentMessages | None) -> PipelineStage:
    batch, length = pipeline.micro_batch_size, labels.shape[1]
    ids = torch.empty(batch, length, dtype=torch.long, device="meta")
    takes = [ids] if stage.is_first else received_like(pipeline, stage, batch, length)
    returns = (
        [_result_like(pipeline, labels).requires_grad_()]
        if stage.is_last
        else sent_like(pipeline, stage, batch, length)
    )
    return RecordedStage(
        pipeline.activity,
        stage.model,
        stage.index,
        stage.num_stages,
        labels.device,
        input_args=tuple(takes),
        output_args=tuple(returns),
        group=pipeline.peers,
        frees_gathered=pipeline.plan.shard.reshard_after_forward == "always",
        reduces_each=pipeline.plan.shard.reduces_each_microbatch,
        sent=sent and sent.add,
    )


def received_like(pipeline: Pipeline, stage: Stage, batch: int, length: int) -> list[Tensor]:
    """Return meta tensors of the shapes that a stage receives, of which tp may split the sequence.

    Args:
        pipeline: of the stage.
        stage: not the first one.
        batch: number of sequences of a microbatch.
        length: of its sequences, in tokens.
    """
    return _split_over_tp(pipeline, stage.received_like(batch, length), stage.received_follow_sequence())


def sent_like(pipeline: Pipeline, stage: Stage, batch: int, length: int) -> list[Tensor]:
    """Return meta tensors of the shapes that a stage sends; the arguments are as above."""
    return _split_over_tp(pipeline, stage.sent_like(batch, length), stage.sent_follow_sequence())


def _split_over_tp(pipeline: Pipeline, tensors: Sequence[Tensor], follow: Sequence[bool]) -> list[Tensor]:
    if not (pipeline.plan.tensor.sequence_parallel and sequence_is_split()):
        return list(tensors)
    tp = axis_size(pipeline.mesh, TP)
    return [_split_shape(tensor, tp) if is_split else tensor for tensor, is_split in zip(tensors, follow, strict=True)]


def _split_shape(tensor: Tensor, tp: int) -> Tensor:
    batch, length, *rest = tensor.shape
    return tensor.new_empty((batch, length // tp, *rest), requires_grad=tensor.requires_grad)


def _result_like(pipeline: Pipeline, labels: Tensor) -> Tensor:
    """Return on meta what the last stage returns for one microbatch: its logits or its loss."""
    if pipeline.head is not None:
        return torch.empty((), dtype=loss_dtype(pipeline.plan), device="meta")
    config, group = pipeline.stages[0].model.config.get_text_config(), pipeline.mesh.get_group(TP)
    width = config.vocab_size
    if pipeline.logits_are_sharded:
        shard = shard_width(config.vocab_size, group)
        width = max(0, min(shard, config.vocab_size - shard * group.rank()))
    dtype = getattr(torch, pipeline.plan.precision.activations)
    return torch.empty(pipeline.micro_batch_size, labels.shape[1], width, dtype=dtype, device="meta")


def _run_forward(pipeline: Pipeline, inputs: dict[str, Tensor], labels: Tensor, loss_function: LossFunction) -> Tensor:
    """Run stage by stage and, within a stage, microbatch by microbatch, for every schedule.

    torch's own `schedule.eval` divides existing gradients, keeps all logits and does not support
    every schedule.
    """
    microbatches = list(_microbatches(inputs, labels, pipeline.micro_batch_size))
    total = torch.zeros((), dtype=torch.float64, device=labels.device)
    borders = ForwardMessages(pipeline.plan.pipeline, pipeline.peers, axis_size(pipeline.mesh, PP))
    for stage in pipeline.stages:
        for microbatch, targets in microbatches:
            received: Sequence[Tensor] = []
            if not stage.is_first:
                like = received_like(pipeline, stage, *targets.shape)
                received = borders.receive(stage.index, [torch.empty_like(it, device=targets.device) for it in like])
            output = stage.compute(received, **microbatch)
            if stage.is_last:
                total += loss_function(output, targets)
            else:
                borders.send(stage.index, output)
        borders.end_stage()
    borders.wait()
    return total


def _microbatches(
    inputs: Mapping[str, Tensor], labels: Tensor, size: int
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    for start in range(0, labels.shape[0], size):
        yield {name: value[start : start + size] for name, value in inputs.items()}, labels[start : start + size]


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a full parameter or gradient on every process of its own mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
