"""State that survives a restart: how a checkpoint takes it, and how it is filled from one.

It consists of the parameters, and of the optimizer's states for those that train. Data order,
learning rate and dropout are functions of the step. Runs and programs with their own loop save and
restore it here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshtrain.checkpoint.dcp.store import MODEL_PREFIX, read_table, restore_checkpoint
from meshtrain.checkpoint.manifest import Manifest, SavedOptimizer
from meshtrain.checkpoint.parallelized import weights_manifest
from meshtrain.compat.operators import norms
from meshtrain.errors import CheckpointError, Problem, TrainingStopped, name_some
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import reshard
from meshtrain.runtime.agreement import gather_objects, raise_together
from meshtrain.runtime.location import Location
from meshtrain.training.optimizer_state import LoadedState, state_tensors
from meshtrain.training.saved_optimizer import not_json
from meshtrain.training.schedule_free import ScheduleFreeAdamW
from meshtrain.training.weight_average import WeightAverage


@dataclass
class TrainState:
    """State that survives a restart: `save_checkpoint` writes it, `load_checkpoint` fills it.

    Attributes:
        model: the result of `parallelize`.
        optimizer: the optimizer of its parameters; None if there is none. It may be any torch
            optimizer that keeps, for each parameter, numbers and tensors of the parameter's (local)
            shape: SGD, Adam, AdamW, Adagrad, RMSprop and others.
        step: number of optimizer steps done.
        values: what else must survive, the same on all processes. For example the `state_dict` of a
            learning-rate scheduler, or the position in the data. Allowed are None, bools, numbers
            (not NaN) and strings, in lists and in dicts with strings for keys.

    The data order is a function of `step`, so it is not saved.

    Source: torch.distributed.checkpoint.stateful.
    """

    model: Any
    optimizer: Optimizer | None = None
    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)


class Snapshot(NamedTuple):
    """What a checkpoint of a state holds."""

    tensors: dict[str, Tensor]
    """Checkpoint key -> the part of the tensor on this process."""
    manifest: Manifest
    """Describes model, step and values; the caller adds its own fields."""


def take_snapshot(pipeline: Pipeline, state: TrainState, average: WeightAverage | None = None) -> Snapshot:
    """Collect what a checkpoint of a state holds. Collective.

    Args:
        pipeline: the pipeline of `state.model`.
        average: of the weights, if there is one.

    Raises:
        CheckpointError: the same on all processes: step or values cannot be saved, or differ
            between ranks.
        TrainingStopped: the same on all processes: a value is not finite.
    """
    step, values = _agreed_step_and_values(state)
    _reshard(pipeline)
    tensors = saved_tensors(pipeline, state.optimizer)
    tensors |= {} if average is None else average.saved()
    check_finite(step, tensors)
    own: dict[str, Any] = {"values": values, "rotary_length": pipeline.rotary_length.grown()}
    if pipeline.base_is_elsewhere:
        own["fused"] = tuple(entry for entry in pipeline.fused if entry.parts[0] in pipeline.trained_names)
    return Snapshot(tensors, weights_manifest(pipeline, step=step).model_copy(update=own))


def restore_snapshot(
    checkpoint: Location,
    manifest: Manifest,
    pipeline: Pipeline,
    state: TrainState,
    optimizer: SavedOptimizer | None = None,
    average: WeightAverage | None = None,
) -> None:
    """Fill a state in place from an intact checkpoint, saved on any mesh. Collective.

    Args:
        manifest: the manifest of the checkpoint.
        pipeline: the pipeline of `state.model`.
        optimizer: describes the optimizer that was saved; None: the optimizer of a run.
        average: of the weights, if there is one.

    Raises:
        CheckpointError: the same on all processes: files cannot be read, or they hold another
            model.
    """
    _reshard(pipeline)
    load_state(checkpoint, pipeline, state.optimizer, optimizer, average)
    pipeline.rotary_length.restore(manifest.rotary_length)
    state.step, state.values = manifest.step, json.loads(manifest.values)


def saved_tensors(pipeline: Pipeline, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return checkpoint key -> the tensor that this process adds to a checkpoint.

    The copy of a tied weight on another stage is left out.

    Args:
        pipeline: with values.
        optimizer: of its parameters.
    """
    owned = dict(_saved(pipeline, pipeline.owned_parameters().items()))
    weights = {f"{MODEL_PREFIX}{fqn}": parameter.detach() for fqn, parameter in owned.items()}
    buffers = {key: buffer for entry in _buffers(pipeline) for key, buffer in entry.items()}
    return {**weights, **state_tensors(optimizer, owned), **buffers}


@torch.no_grad()
def load_state(
    checkpoint: Location,
    pipeline: Pipeline,
    optimizer: Optimizer | None,
    saved: SavedOptimizer | None = None,
    average: WeightAverage | None = None,
) -> None:
    """Fill parameters and optimizer states from an intact checkpoint. Collective.

    Args:
        saved: describes the optimizer that was saved; None: the optimizer of a run.
        average: of the weights, if there is one.

    Raises:
        CheckpointError: the same on all processes: files cannot be read, or they hold another
            model.
    """
    fqns = pipeline.canonical_names()
    parameters = dict(_saved(pipeline, pipeline.named_parameters()))
    state = LoadedState(optimizer, parameters, fqns, read_table(checkpoint), saved)
    models = [{f"{MODEL_PREFIX}{fqns[name]}": parameter.detach()} for name, parameter in parameters.items()]
    averages = [] if average is None else average.loaded()
    wanted, duplicates = _without_duplicates([*models, *state.tensors, *averages, *_buffers(pipeline)])
    restore_checkpoint(checkpoint, wanted, is_verified=True)
    _fill_duplicates(duplicates)
    state.keep()
    if isinstance(optimizer, ScheduleFreeAdamW):
        optimizer.take_up()


@torch.no_grad()
def load_weights_of(checkpoint: Location, pipeline: Pipeline) -> None:
    """Fill the weights alone from a checkpoint. Collective.

    Values are cast to the number format that the parameters have here.

    Args:
        checkpoint: saved on any mesh.
        pipeline: whose parameters and buffers are filled.

    Raises:
        CheckpointError: the same on all processes: files are missing or damaged, or they hold
            another model.
    """
    fqns = pipeline.canonical_names()
    parameters = _saved(pipeline, pipeline.named_parameters())
    weights = [{f"{MODEL_PREFIX}{fqns[name]}": tensor.detach()} for name, tensor in parameters]
    wanted, duplicates = _without_duplicates([*weights, *_buffers(pipeline)])
    restore_checkpoint(checkpoint, wanted, weights_only=True)
    _fill_duplicates(duplicates)


def _agreed_step_and_values(state: TrainState) -> tuple[int, str]:
    """Return the step, and the values as JSON. Collective.

    Raises:
        CheckpointError: if the values cannot be saved as JSON, or step or values differ between
            ranks.
    """
    advice = "save what JSON has: None, bools, numbers and strings, in lists and in dicts with strings for keys"
    problems = [Problem(found, advice) for found in not_json(state.values, "state.values")]
    raise_together(problems[:1], CheckpointError)
    here = (state.step, json.dumps(state.values))
    for rank, there in enumerate(answers := gather_objects(here)):
        for what, first, other in zip(("step", "values"), answers[0], there, strict=True):
            if first != other:
                raise CheckpointError(
                    f"state.{what} is {other} on rank {rank} and {first} on rank 0, but it is saved once",
                    "make it the same on all ranks: gather values that differ",
                )
    return here


def _reshard(pipeline: Pipeline) -> None:
    # A forward pass without a backward pass leaves parameters gathered over dp_shard.
    for stage in pipeline.stages:
        reshard(stage.model)


def _saved(pipeline: Pipeline, parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a checkpoint holds."""
    return ((name, it) for name, it in parameters if it.requires_grad or not pipeline.base_is_elsewhere)


def _buffers(pipeline: Pipeline) -> list[dict[str, Tensor]]:
    if pipeline.base_is_elsewhere:
        return []
    return [{f"{MODEL_PREFIX}{name}": buffer} for name, buffer in pipeline.saved_buffers()]


def _without_duplicates(
    states: Iterable[Mapping[str, Tensor]],
) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Return key -> tensor, and (copy, original) for keys that occur twice.

    A checkpoint is read by name. A process with both ends of a tied weight needs one name twice.
    """
    wanted: dict[str, Tensor] = {}
    duplicates: list[tuple[Tensor, Tensor]] = []
    for key, value in (item for state in states for item in state.items()):
        if key in wanted:
            duplicates.append((value, wanted[key]))
        else:
            wanted[key] = value
    return wanted, duplicates


def _fill_duplicates(duplicates: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the values of the originals into the copies of tied weights."""
    for copy, original in duplicates:
        local_tensor(copy).copy_(local_tensor(original))


@torch.no_grad()
def check_finite(step: int, tensors: Mapping[str, Tensor]) -> None:
    """Check that every number in a state to be saved is finite. Collective.

    Raises:
        TrainingStopped: on all processes alike, if a parameter, buffer or optimizer state of any of
            them is not finite.
    """
    floats = [local_tensor(tensor) for tensor in tensors.values() if tensor.is_floating_point()]
    largest = norms([tensor for tensor in floats if tensor.numel()], float("inf"))
    broken = not all(norm.isfinite() for norm in largest)
    names = [key for key, tensor in tensors.items() if not local_tensor(tensor).isfinite().all()] if broken else []
    found = sorted({name for answer in gather_objects(names) for name in answer})
    if found:
        raise TrainingStopped(
            f"step {step}: these values are not finite: {name_some(found, 3)}; training stopped before a checkpoint "
            "was written",
            "resume from the last one with a lower optimizer.learning_rate, or a lower optimizer.max_gradient_norm",
        )
