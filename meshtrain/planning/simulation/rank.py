"""Simulate the step of one process of a run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshtrain.compat.dtensor import local_part
from meshtrain.compat.fake import (
    NEEDS_VALUES,
    attention_as_on_gpus,
    fake_process_group,
    fake_tensors,
    propagation_marked,
    resizes_seen,
    rows_joined,
    storage_key,
    votes_skipped,
)
from meshtrain.compat.fake_operators import QuickFakeTensors
from meshtrain.compat.fsdp import before_reduction, gathered_parameters, padded_once, unreduced_gradients
from meshtrain.compat.operators_seen import tensors_of
from meshtrain.config.mesh import AXES, EP, EXPERT_FSDP_AXES, FSDP_AXES, PP, STAGE, fsdp_axis_of
from meshtrain.errors import ModelError
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.float8.product import products_as_on_gpus
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import fsdp_modules
from meshtrain.planning.simulation.building import build_context, build_models
from meshtrain.planning.simulation.no_passes import leave_out_layer, without_passes
from meshtrain.planning.simulation.optimizer import FakeOptimizer
from meshtrain.planning.simulation.profile import AHEAD, FORWARD, RankProfile, profile_of
from meshtrain.planning.simulation.recorder import HEAD, Place, Recorder, Role
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.runtime.activity import Activity
from meshtrain.runtime.mesh import axis_size, fsdp_group, stage_group
from meshtrain.training.distillation.passes import BuiltTeacher
from meshtrain.training.preference.rows import reference_like
from meshtrain.training.step import train_step
from meshtrain.training.weight_average import build_average

CPU = torch.device("cpu")
AnyRecorder = TypeVar("AnyRecorder", bound=Recorder)


class NotSimulated(ModelError):
    """The step of a model cannot be simulated, because an operator needs values."""


class Watch:
    """Tells a recorder what a pipeline computes, and what its memory is for.

    Args:
        recorder: to be told.
        pipeline: whose layers are watched.
    """

    def __init__(self, recorder: Recorder, pipeline: Pipeline) -> None:
        self.recorder, self._pipeline = recorder, pipeline
        pipeline.activity.listener = self._enter
        # While FSDP2 has parameters gathered, they are not among those of the modules.
        self._parameters = [parameter for _, parameter in pipeline.named_parameters()]
        self._sharded = [module for stage in pipeline.stages for module in fsdp_modules(stage.model)]
        recorder.hold(map(_local, self._parameters), Role.PARAMETERS)
        for stage in pipeline.stages:
            recorder.hold(stage.model.buffers(), Role.BUFFERS)
            self._watch_layers(stage)

    def _enter(self, activity: Activity) -> None:
        self.find_gradients()
        ends_model = activity.stage is not None and activity.stage == self._pipeline.num_stages - 1
        # The loss follows the head, and its backward pass begins with it.
        place = HEAD if ends_model and activity.phase in ("after forward", "backward") else None
        self.recorder.enter(activity.phase, activity.stage, activity.microbatch, place)

    def find_gradients(self) -> None:
        """Give gradients and gathered parameters their roles."""
        recorder = self.recorder
        for module in self._sharded:
            recorder.hold(map(_local, unreduced_gradients(module)), Role.UNREDUCED)
            recorder.hold(map(_local, gathered_parameters(module)), Role.GATHERED)
        gradients = [it.grad for it in self._parameters if it.grad is not None]
        recorder.hold(map(_local, gradients), Role.GRADIENTS)

    def _watch_layers(self, stage: Stage) -> None:
        layers = stage.own_layers()
        for place, layer in enumerate(layers):
            ends_model = stage.is_last and layer is layers[-1]
            self._watch_layer(layer, place, HEAD if ends_model else None)

    def _watch_layer(self, layer: nn.Module, place: int, behind: Place) -> None:
        recorder = self.recorder

        def begin(module: nn.Module, args: Any) -> None:
            recorder.move(place)

        def begin_backward(gradient: Tensor) -> None:
            recorder.move(place)

        def is_again() -> bool:
            # The layer is computed again in the backward pass, which goes on in it.
            return recorder.actions[-1].phase != FORWARD[0]

        def watch_gradient(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in () if is_again() else tensors_of(output)[:1]:
                if tensor.requires_grad:
                    tensor.register_hook(begin_backward)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if not is_again():
                recorder.move(behind)

        def begin_reduction(module: FSDPModule) -> None:
            recorder.move(place)

        for sharded in fsdp_modules(layer):
            # With a pipeline, FSDP2 reduces the gradients of all layers after a backward pass.
            before_reduction(sharded, begin_reduction)
        layer.register_forward_pre_hook(begin)
        # Before the hook of FSDP2, which gathers the parameters of this layer in its backward pass.
        layer.register_forward_hook(watch_gradient, prepend=True)
        layer.register_forward_hook(end)


def _local(tensor: Tensor) -> Tensor:
    # Without an operator: a view of freed memory would fill it again, if the memory is fake.
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


def group_axes(pipeline: Pipeline) -> dict[str, str]:
    """Return the axis of each process group of a pipeline, by the name of the group."""
    mesh = pipeline.mesh
    # Several names may stand for one group, and the last one counts.
    stage = stage_group(mesh)
    names = {} if stage is None else {str(stage.group_name): STAGE}
    names |= {str(mesh.get_group(axis).group_name): axis for axis in AXES}
    # Without ep, experts are sharded as everything else is.
    for axes in (FSDP_AXES, EXPERT_FSDP_AXES) if axis_size(mesh, EP) > 1 else (FSDP_AXES,):
        names[str(fsdp_group(mesh, axes).group_name)] = fsdp_axis_of(pipeline.plan.mesh.degrees, axes)
    along_pp = [pipeline.peers, *(tie.group for tie in pipeline.tied_copies.ties)]
    return names | {str(group.group_name): PP for group in along_pp if group is not None}


def simulate_rank(run: SimulatedRun, rank: int) -> RankProfile:
    """Return what one process does in a step.

    Args:
        run: of which it is a part.
        rank: its number.

    Raises:
        NotSimulated: for a class with an operator that needs values.
    """
    return profile_of(record_rank(run, rank, Recorder), num_microbatches(run.plan, run.batch))


def simulate_without_passes(run: SimulatedRun, rank: int) -> RankProfile:
    """Return what one process does in a step before and after the passes of microbatches.

    Its parameters get gradients in place of the passes. The arguments are those of `simulate_rank`.
    """
    with _built_process(run, rank) as process:
        return process.profile(without_passes(process.pipeline))


@dataclass(frozen=True)
class WithOneLess:
    """What one process does in a step, and what the same without one of its layers does.

    Attributes:
        full: a step with all layers.
        less: a step without one of them, and without passes.
        buffers_outside_layers: stage -> bytes of each of its buffers outside of its layers.
    """

    full: RankProfile
    less: RankProfile
    buffers_outside_layers: dict[int, list[int]]


def simulate_with_one_less(run: SimulatedRun, rank: int, stage: int, layer: int) -> WithOneLess:
    """Return what one process does in a step, and without one of its layers.

    Args:
        run: of which it is a part.
        rank: its number.
        stage: index of the stage that holds the layer.
        layer: counted from the first one of the stage.

    Raises:
        NotSimulated: for a class with an operator that needs values.
    """
    with _built_process(run, rank) as process:
        full = process.profile(process.pipeline)
        buffers = {it.index: _buffers_outside_layers(it) for it in process.pipeline.stages}
        leave_out_layer(process.pipeline, stage, layer)
        return WithOneLess(full, process.profile(without_passes(process.pipeline)), buffers)


def _buffers_outside_layers(stage: Stage) -> list[int]:
    """Return the bytes of each buffer of a stage outside of its layers."""
    inside = {id(buffer) for layer in stage.own_layers() for buffer in layer.buffers()}
    storages = (it.untyped_storage() for it in stage.model.buffers() if id(it) not in inside)
    return [storage.nbytes() for storage in {storage_key(it): it for it in storages}.values()]


def record_rank(run: SimulatedRun, rank: int, kind: type[AnyRecorder]) -> AnyRecorder:
    """Return a recorder that has seen the step of one process.

    Args:
        run: of which the process is a part.
        rank: its number.
        kind: class of the recorder.

    Raises:
        NotSimulated: for a class with an operator that needs values.
    """
    with _built_process(run, rank) as process:
        return process.record(process.pipeline, kind)


@contextmanager
def _built_process(run: SimulatedRun, rank: int) -> Iterator["_Process"]:
    """Be one process of a run while the block runs, with its models over fake tensors."""
    try:
        with fake_process_group(rank, run.plan.mesh.world_size):
            yield _Process(run, *build_models(run, CPU, QuickFakeTensors(fake_tensors())))
    except NEEDS_VALUES as error:
        raise NotSimulated(
            f"the step of a {run.hf_config.model_type} cannot be simulated: {error.func} needs values, which are not "
            "known before a run",
            "leave out --gpu; `meshtrain check` still shows the bytes of parameters, gradients and optimizer state",
        ) from error


@dataclass(frozen=True)
class _Process:
    """One process of a run.

    Attributes:
        run: of which it is a part.
        pipeline: of the model that trains.
        teacher: if the run has one.
    """

    run: SimulatedRun
    pipeline: Pipeline
    teacher: BuiltTeacher | None

    def profile(self, pipeline: Pipeline) -> RankProfile:
        """Return what the process does in a step with its pipeline, or with a changed one."""
        return profile_of(self.record(pipeline, Recorder), num_microbatches(self.run.plan, self.run.batch))

    def record(self, pipeline: Pipeline, kind: type[AnyRecorder]) -> AnyRecorder:
        """Return a recorder that has seen a step with a pipeline.

        Args:
            pipeline: of this process, or a changed one.
            kind: class of the recorder.
        """
        run, teacher = self.run, self.teacher
        # The groups are made before tensors are fake, because torch looks for this process in a
        # tensor.
        axes = group_axes(pipeline)
        with ExitStack() as stack:
            with QuickFakeTensors(fake_tensors()):
                optimizer = FakeOptimizer(pipeline, run.optimizer)
                optimizer.make_states()
                average = build_average(pipeline, run.ema)
                batch = _batch(run)
            stack.enter_context(fake_tensors())
            recorder = kind(axes, answers=True, granularity=run.granularity)
            watch = Watch(recorder, pipeline)
            recorder.hold(optimizer.states(), Role.OPTIMIZER)
            recorder.hold([] if average is None else average.tensors(), Role.OPTIMIZER)
            if teacher is not None:
                recorder.hold((_local(it) for _, it in teacher.pipeline.named_parameters()), Role.TEACHER)
                _watch_teacher(recorder, teacher.pipeline)
            context = build_context(run, pipeline, teacher, optimizer, average)
            recorder.hold(batch.values(), Role.BATCH)
            pipeline.prepare(batch["labels"])
            for part in _as_simulated(run, recorder):
                stack.enter_context(part)
            train_step(context, 0, batch, np.arange(run.batch.global_batch_size))
            watch.find_gradients()
        return recorder


def _watch_teacher(recorder: Recorder, teacher: Pipeline) -> None:
    """Begin a section for each pass of a teacher that goes through its stages before the model."""

    def begin(module: nn.Module, args: Any) -> None:
        recorder.enter(AHEAD)

    for stage in teacher.stages if teacher.num_stages > 1 else ():
        # Before the hook of FSDP2, which gathers parameters.
        stage.model.register_forward_pre_hook(begin, prepend=True)


def _as_simulated(run: SimulatedRun, recorder: Recorder) -> Iterator[AbstractContextManager[Any]]:
    """Yield what is entered while a step is simulated; the recorder is the last one."""
    # Compiled layers are simulated as they are written.
    yield torch.compiler.set_stance("force_eager")
    yield votes_skipped()
    yield padded_once()
    if "position_ids" not in run.inputs:
        yield rows_joined()
    if run.on_gpus:
        yield attention_as_on_gpus()
        yield products_as_on_gpus()
    yield propagation_marked(recorder.hide)
    yield resizes_seen(recorder.resized)
    yield recorder


def _batch(run: SimulatedRun) -> dict[str, Tensor]:
    rows = num_microbatches(run.plan, run.batch) * run.batch.micro_batch_size
    names = ("input_ids", "labels", *run.inputs)
    found = {name: torch.ones(rows, run.batch.sequence_length, dtype=torch.long) for name in names}
    return found | reference_like(run.preference, found["labels"])
