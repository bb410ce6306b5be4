"""State that a torch optimizer keeps for each parameter: by name, in the layout of the parameter.

So it can be restored on any mesh. A parameter that never had a gradient has no state, and none is
made up for it. An optimizer whose class has `reduced_states` keeps states with one number for each
row or column: their names -> the dimension that has size 1. `block_states` names states with one
number for each block of the last dimension: -> the size of a block. No mesh may cut a block.
`scalar_states` names states of one number, besides `step`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from meshtrain.checkpoint.dcp.reading import tensor_entries
from meshtrain.checkpoint.manifest import SavedOptimizer
from meshtrain.errors import Problem
from meshtrain.models.layout import blocks_shape, reduced_shape
from meshtrain.parallel.local_parameter import full_parameter, laid_out_as, laid_out_as_blocks, laid_out_as_reduced

OPTIMIZER_PREFIX = "optimizer."
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


class Slot(NamedTuple):
    """Where an optimizer keeps a parameter."""

    group: int
    parameter: Tensor
    """The tensor in the optimizer: the model's parameter, or its LocalParameter."""


def slots_of(optimizer: Optimizer | None) -> dict[int, Slot]:
    """Return id of the model's parameter -> where the optimizer keeps it."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {
        id(full_parameter(parameter)): Slot(index, parameter)
        for index, group in enumerate(groups)
        for parameter in group["params"]
    }


def state_tensors(optimizer: Optimizer | None, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Return `optimizer.<state>.<FQN>` -> state, in the layout of the parameter; (1,) for a number.

    Tensors share the memory of the optimizer's state. Numbers of Python are copied.

    Args:
        parameters: FQN -> parameter of the model.
    """
    slots = slots_of(optimizer)
    return {
        f"{OPTIMIZER_PREFIX}{state}.{fqn}": value
        for fqn, parameter in parameters.items()
        if optimizer is not None and id(parameter) in slots
        for state, value in _laid_out(optimizer, slots[id(parameter)]).items()
    }


def kind_of(optimizer: Optimizer, state: str, value: object, parameter: Tensor) -> str | None:
    """Return the kind of a state, or None for a kind that a checkpoint cannot hold.

    A `number` is one of Python. A `scalar` has no dimensions, and a `parameter` has the shape of
    the parameter. A `reduced` one has this shape with size 1 in one dimension, and `blocks` have
    their number in place of the last dimension. `none` is no value.

    Args:
        optimizer: that keeps it.
        state: name of the state.
        value: of the state.
        parameter: the tensor in the optimizer.
    """
    if value is None:
        return "none"
    if type(value) in NUMBERS:
        return "number"
    if "." in state or not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    if value.dim() == 0 and (parameter.dim() > 0 or state == "step"):
        return "scalar"
    if state in _reduced_dims(optimizer):
        return "reduced"
    if state in _block_sizes(optimizer):
        return "blocks"
    return "parameter" if value.shape == parameter.shape else None


def _reduced_dims(optimizer: Optimizer) -> Mapping[str, int]:
    """Return state -> the dimension in which it has size 1, for such states."""
    found: Mapping[str, int] = getattr(optimizer, "reduced_states", {})
    return found


def _block_sizes(optimizer: Optimizer) -> Mapping[str, int]:
    """Return state -> the size of the blocks for which it has a number each, for such states."""
    found: Mapping[str, int] = getattr(optimizer, "block_states", {})
    return found


class LoadedState:
    """States of parameters while a checkpoint is read into them.

    `keep` passes them to the optimizer.

    Args:
        optimizer: if None, nothing is read.
        parameters: name -> parameter of the model; the two ends of a tied weight share one FQN.
        fqns: name -> FQN in the checkpoint.
        metadata: the table of the checkpoint.
        saved: the description of the optimizer in the manifest.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        parameters: Mapping[str, Parameter],
        fqns: Mapping[str, str],
        metadata: Metadata,
        saved: SavedOptimizer | None,
    ) -> None:
        self._optimizer = optimizer
        of_run = ("step", *getattr(optimizer, "scalar_states", ()))
        self._scalars = of_run if saved is None else saved.scalars
        self._numbers = () if saved is None else saved.numbers
        self._states: dict[Tensor, dict[str, Tensor]] = {}
        self.tensors: list[dict[str, Tensor]] = []
        slots, entries = slots_of(optimizer), _entries_by_fqn(metadata)
        for name, parameter in parameters.items():
            slot, fqn = slots.get(id(parameter)), fqns[name]
            if slot is not None:
                states = {state: self._room(slot, state, dtype) for state, dtype in entries.get(fqn, ())}
                self._states[slot.parameter] = states
                assert optimizer is not None
                self.tensors.append(
                    {
                        f"{OPTIMIZER_PREFIX}{state}.{fqn}": _whole(optimizer, state, value, parameter)
                        for state, value in states.items()
                    }
                )

    def keep(self) -> None:
        """Replace the states of the optimizer by those that were read."""
        for parameter, states in self._states.items():
            assert self._optimizer is not None
            self._optimizer.state.pop(parameter, None)
            if states:
                self._optimizer.state[parameter] = {
                    state: value.item() if state in self._numbers else value for state, value in states.items()
                }

    def _room(self, slot: Slot, state: str, dtype: torch.dtype) -> Tensor:
        assert self._optimizer is not None
        if state not in self._scalars:
            like, dim = slot.parameter.detach(), _reduced_dims(self._optimizer).get(state)
            if dim is not None:
                return like.new_empty(reduced_shape(like.shape, dim), dtype=dtype)
            if state in (sizes := _block_sizes(self._optimizer)):
                return like.new_empty(blocks_shape(like.shape, sizes[state]), dtype=dtype)
            return torch.empty_like(like, dtype=dtype)
        group = self._optimizer.param_groups[slot.group]
        # As in torch's own `load_state_dict`: kernels that never wait for the device need the step
        # count on the device.
        on_host = state in self._numbers or (state == "step" and not (group.get("fused") or group.get("capturable")))
        return torch.empty((), dtype=dtype, device="cpu" if on_host else slot.parameter.device)


def unsupported_states(optimizer: Optimizer, names: Mapping[int, str]) -> list[Problem]:
    """Return what a checkpoint cannot hold, or which parameters are not the model's; at most one.

    Args:
        names: id of the model's parameter -> FQN.
    """
    problems = []
    foreign = [slot for key, slot in slots_of(optimizer).items() if key not in names]
    if foreign:
        shapes = sorted({str(tuple(slot.parameter.shape)) for slot in foreign})
        several = f"{len(foreign)} tensors that are not parameters"
        tensors = several if len(foreign) > 1 else "a tensor that is not a parameter"
        problems.append(
            Problem(
                f"the optimizer holds {tensors} of the model, of shape {', '.join(shapes[:3])}",
                "make it from the parallel model, or call meshtrain.rebind(optimizer)",
            )
        )
    what = f"{type(optimizer).__name__} keeps"
    for key, slot in slots_of(optimizer).items():
        shape = tuple(slot.parameter.shape)
        for state, value in optimizer.state.get(slot.parameter, {}).items():
            if key in names and kind_of(optimizer, state, value, slot.parameter) is None:
                found = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                problems.append(
                    Problem(
                        f"{what} {state!r} of {names[key]} as {found}; a checkpoint holds numbers, and tensors of the "
                        f"shape of the parameter, here {shape}",
                        "use an optimizer that keeps nothing else",
                    )
                )
    return problems[:1]


def kinds_of_states(optimizer: Optimizer) -> set[tuple[str, str]]:
    """Return (state, kind) of all states; the kind is that of `kind_of`, but not `none`."""
    return {
        (state, kind)
        for slot in slots_of(optimizer).values()
        for state, value in optimizer.state.get(slot.parameter, {}).items()
        if (kind := kind_of(optimizer, state, value, slot.parameter)) not in (None, "none")
    }


def _laid_out(optimizer: Optimizer, slot: Slot) -> dict[str, Tensor]:
    found = {}
    for state, value in optimizer.state.get(slot.parameter, {}).items():
        kind = kind_of(optimizer, state, value, slot.parameter)
        if kind == "number":
            found[state] = torch.tensor([value], dtype=NUMBERS[type(value)])
        elif kind != "none":
            found[state] = _whole(optimizer, state, value, full_parameter(slot.parameter))
    return found


def _whole(optimizer: Optimizer, state: str, value: Tensor, parameter: Tensor) -> Tensor:
    """Return a state in the form that a checkpoint has."""
    if value.dim() == 0:
        return value.view(1)
    dim = _reduced_dims(optimizer).get(state)
    if dim is not None:
        return laid_out_as_reduced(value, parameter, dim)
    if state in (sizes := _block_sizes(optimizer)):
        return laid_out_as_blocks(value, parameter, sizes[state])
    return value if isinstance(value, DTensor) else laid_out_as(value, parameter)


def _entries_by_fqn(metadata: Metadata) -> dict[str, Sequence[tuple[str, torch.dtype]]]:
    found: dict[str, list[tuple[str, torch.dtype]]] = {}
    for key, entry in tensor_entries(metadata, OPTIMIZER_PREFIX).items():
        state, _, fqn = key.removeprefix(OPTIMIZER_PREFIX).partition(".")
        found.setdefault(fqn, []).append((state, entry.properties.dtype))
    return dict(found)
