"""The parallel model for the training step: one interface, with or without a pipeline schedule."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from meshtrain.compat.nn import saved_buffers
from meshtrain.config.mesh import PP
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ModelError, Problem
from meshtrain.models.adapters import initialize_adapters, without_adapters
from meshtrain.models.dora import initialize_magnitudes
from meshtrain.models.fused import FusedParameter
from meshtrain.models.initialize import initialize_weights
from meshtrain.models.packed import clear_packed
from meshtrain.parallel.borders import received_like
from meshtrain.parallel.context.parts import ContextParallel
from meshtrain.parallel.cut.originals import originals_in_place
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.experts.use import ExpertUse
from meshtrain.parallel.head.chunks import ChunkedHead, LossFunction, take_loss
from meshtrain.parallel.randomness import ForwardStreams
from meshtrain.parallel.replicas import Replicas
from meshtrain.parallel.rotary_length import RotaryLength
from meshtrain.parallel.routers.loss import RouterLoss
from meshtrain.parallel.schedule import ForwardMessages
from meshtrain.parallel.shard import prepare_backward, reshard
from meshtrain.parallel.stage_attention import StageAttention
from meshtrain.parallel.tied import TiedCopies
from meshtrain.parallel.torch_schedule import StepSchedule, schedule_for
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
        schedules: shape of the labels -> torch's schedule, with a pipeline.
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
    schedules: dict[tuple[int, ...], StepSchedule] = field(default_factory=dict)

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
            held = dict(stage.named_parameters(remove_duplicate=False))
            firsts: dict[nn.Parameter, str] = {}
            for name, parameter in held.items():
                firsts.setdefault(parameter, name)
            for parameter, name in firsts.items():
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
                schedule_for(self, part)

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
    if tuple(labels.shape) not in pipeline.schedules:
        _check_trains(pipeline, labels.device)
    schedule = schedule_for(pipeline, labels)
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


def _check_trains(pipeline: Pipeline, device: torch.device) -> None:
    # A stage assumes that its input needs a gradient, even if no earlier stage trains. So one stage
    # alone cannot detect that nothing trains.
    idle = torch.tensor(float(not any(True for _ in pipeline.trainable_parameters())), device=device)
    if all_reduce_over(idle, pipeline.mesh, [PP], dist.ReduceOp.MIN).item():
        raise ModelError(NOTHING_TRAINS)


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
