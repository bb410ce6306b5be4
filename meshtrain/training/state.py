"""All that survives a restart: parameters, and what the optimizer remembers of them.

A frozen parameter has no such memory. Data order, learning rate and dropout are functions of the step, so nothing
else of a run is saved.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshtrain.checkpoint.location import Location
from meshtrain.checkpoint.manifest import SavedOptimizer
from meshtrain.checkpoint.store import MODEL_PREFIX, load_checkpoint, read_table
from meshtrain.errors import TrainingStopped, name_some
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.agreement import gather_objects
from meshtrain.training.optimizer_state import LoadedState, state_tensors


@dataclass
class TrainState:
    """All of a training that survives a restart; `save_checkpoint` writes it, `load_checkpoint` fills it.

    Attributes:
        model: what `parallelize` has returned.
        optimizer: of its parameters; None if there is none. Any torch optimizer that keeps, for each parameter,
            numbers and tensors of the parameter's (local) shape: SGD, Adam, AdamW, Adagrad, RMSprop and others.
        step: optimizer steps done.
        values: whatever else is to survive, the same on all processes: None, bools, numbers (but NaN) and strings, in
            lists and in dicts with strings for keys. Such as the `state_dict` of a learning-rate scheduler, or the
            place in the data.

    Source: torch.distributed.checkpoint.stateful; the data order is no part of it, as it is a function of `step`.
    """

    model: Any
    optimizer: Optimizer | None = None
    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)


def saved_tensors(pipeline: Pipeline, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return what this process adds to a checkpoint, by name; the far copy of a tied weight is left out."""
    owned = pipeline.owned_parameters()
    weights = {f"{MODEL_PREFIX}{fqn}": parameter.detach() for fqn, parameter in owned.items()}
    buffers = {key: buffer for entry in _buffers(pipeline) for key, buffer in entry.items()}
    return {**weights, **state_tensors(optimizer, owned), **buffers}


@torch.no_grad()
def load_state(
    checkpoint: Location, pipeline: Pipeline, optimizer: Optimizer | None, saved: SavedOptimizer | None = None
) -> None:
    """Fill parameters and what the optimizer remembers from a whole checkpoint. Collective.

    Args:
        saved: what the manifest says of the optimizer; None: it is that of a run.

    Raises:
        CheckpointError: the same on all processes: files cannot be read, or they hold another model.
    """
    fqns, parameters = pipeline.canonical_names(), dict(pipeline.named_parameters())
    state = LoadedState(optimizer, parameters, fqns, read_table(checkpoint), saved)
    models = [{f"{MODEL_PREFIX}{fqns[name]}": parameter.detach()} for name, parameter in parameters.items()]
    wanted, twins = _without_twins([*models, *state.tensors, *_buffers(pipeline)])
    load_checkpoint(checkpoint, wanted, is_verified=True)
    _fill_twins(twins)
    state.keep()


@torch.no_grad()
def load_weights_of(checkpoint: Location, pipeline: Pipeline) -> None:
    """Fill the parameters alone from a checkpoint, and cast them to the number format that they have here. Collective.

    Raises:
        CheckpointError: the same on all processes: files are missing or damaged, or they hold another model.
    """
    fqns = pipeline.canonical_names()
    parameters = pipeline.named_parameters()
    weights = [{f"{MODEL_PREFIX}{fqns[name]}": tensor.detach()} for name, tensor in parameters]
    wanted, twins = _without_twins([*weights, *_buffers(pipeline)])
    load_checkpoint(checkpoint, wanted, weights_only=True)
    _fill_twins(twins)


def _buffers(pipeline: Pipeline) -> list[dict[str, Tensor]]:
    return [{f"{MODEL_PREFIX}{name}": buffer} for name, buffer in pipeline.saved_buffers()]


def _without_twins(states: Iterable[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Return key -> tensor, and (copy, original) of keys that are asked for twice.

    A checkpoint is read by name, and a process that holds both ends of a tie would ask for one name twice.
    """
    wanted: dict[str, Tensor] = {}
    twins: list[tuple[Tensor, Tensor]] = []
    for key, value in (item for state in states for item in state.items()):
        if key in wanted:
            twins.append((value, wanted[key]))
        else:
            wanted[key] = value
    return wanted, twins


def _fill_twins(twins: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give the far copy of a tied weight what the original has."""
    for copy, original in twins:
        local_tensor(copy).copy_(local_tensor(original))


@torch.no_grad()
def check_finite(step: int, tensors: Mapping[str, Tensor]) -> None:
    """Refuse to save what no run could go on from. Collective.

    Raises:
        TrainingStopped: on all processes alike, if a parameter or moment of any of them is not finite.
    """
    floats = [local_tensor(tensor) for tensor in tensors.values() if tensor.is_floating_point()]
    largest = torch._foreach_norm([tensor for tensor in floats if tensor.numel()], float("inf"))
    broken = not all(norm.isfinite() for norm in largest)
    names = [key for key, tensor in tensors.items() if not local_tensor(tensor).isfinite().all()] if broken else []
    found = sorted({name for answer in gather_objects(names) for name in answer})
    if found:
        raise TrainingStopped(
            f"step {step}: not finite: {name_some(found, 3)}; stopped before a checkpoint of it was written. Resume "
            "from the last one with a lower optimizer.learning_rate, or a lower optimizer.max_gradient_norm"
        )
