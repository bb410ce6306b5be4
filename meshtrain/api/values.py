"""The values of a program's model: taken out before the cut, copied into the shards later."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from meshtrain.compat.autograd import has_gradient_hooks
from meshtrain.compat.nn import buffer_table, parameter_table
from meshtrain.errors import ModelError
from meshtrain.models.adapters import adapter_parameters
from meshtrain.models.dtypes import dtype_name
from meshtrain.models.fused import FusedParameter, split_parts
from meshtrain.models.layout import local_ranges, local_tensor
from meshtrain.models.rotary import apply_sequence_length, grown_length, length_dependent
from meshtrain.parallel.local_parameter import laid_out_as
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.agreement import gather_objects
from meshtrain.runtime.digest import tensor_digest

SAMPLED = 1024
"""Number of elements of a tensor that are compared between processes."""


@dataclass
class Values:
    """The values of a model before it became parallel.

    Attributes:
        parameters: stock FQN -> the parameter, a tied one once; `put` empties them one by one.
        buffers: FQN -> values.
        is_meta: whether the parameters are on the meta device, without values.
        scalings: stock FQN -> name of an adapter there -> its scaling factor.
        grown_length: number of tokens for which its rotary frequencies were computed; 0: they are
            unchanged; None: they do not depend on the length.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    is_meta: bool
    scalings: dict[str, dict[str, float]] = field(default_factory=dict)
    grown_length: int | None = None


def take(model: nn.Module, adapters: Mapping[str, nn.Module], undo: ExitStack) -> Values:
    """Move a model to the meta device in place, and return its values.

    Args:
        model: a stock model.
        adapters: adapters that were taken off it; moved too.
        undo: receives callbacks that put everything back.

    Raises:
        ModelError: if part of the model is on meta, or has hooks on gradients.
    """
    parameters = dict(model.named_parameters()) | adapter_parameters(adapters)
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers() if not buffer.is_meta}
    on_meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    if on_meta and len(on_meta) < len(parameters):
        raise ModelError(
            f"{len(on_meta)} of {len(parameters)} parameters are on the meta device ({on_meta[0]}), the others have "
            "values",
            "build the full model on meta, or no part of it",
        )
    hooked = [name for name, parameter in parameters.items() if has_gradient_hooks(parameter)]
    if hooked:
        raise ModelError(
            f"{len(hooked)} parameters have hooks on their gradients ({hooked[0]}), which would receive only that of "
            "one rank",
            "change parameter.grad after loss.backward() instead",
        )
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in chain(model.modules(), *(layer.modules() for layer in adapters.values())):
        own, own_buffers = parameter_table(module), buffer_table(module)
        for name, parameter in own.items():
            if parameter is not None:
                if parameter not in replaced:
                    empty = torch.empty_like(parameter, device="meta")
                    replaced[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                undo.callback(own.__setitem__, name, parameter)
                own[name] = replaced[parameter]
        for name, buffer in own_buffers.items():
            undo.callback(own_buffers.__setitem__, name, buffer)
            own_buffers[name] = None if buffer is None else buffer.to("meta")
    layers: Mapping[str, Any] = adapters
    scalings = {name: dict(layer.scaling) for name, layer in layers.items()}
    grown = grown_length(model) if length_dependent(model) else None
    return Values(parameters, buffers, is_meta=bool(on_meta), scalings=scalings, grown_length=grown)


def check_equal_on_all(values: Values) -> None:
    """Check that every process passed the same model. Collective.

    A sample of every tensor is compared, because a model that each process initialized separately
    differs everywhere. Also compared are which parameters are frozen (processes reduce the
    gradients of the others together), existing gradients, and the scaling of adapters.

    Raises:
        ModelError: on all processes alike, if not.
    """
    mine = {name: _describe(parameter) for name, parameter in values.parameters.items()}
    mine |= {f"the scaling of {name}": str(scaling) for name, scaling in values.scalings.items()}
    if values.grown_length is not None:
        mine["the longest sequence of its rotary frequencies"] = f"{values.grown_length} tokens"
    # Gather a hash of every rank first, and the details only where the hashes differ.
    if len(set(gather_objects(xxhash.xxh3_128_hexdigest(json.dumps(mine, sort_keys=True).encode())))) == 1:
        return
    first, *others = gather_objects(mine)
    for rank, other in enumerate(others, start=1):
        if different := [name for name in first | other if first.get(name) != other.get(name)]:
            name = different[0]
            raise ModelError(
                f"ranks 0 and {rank} pass models that differ in {len(different)} of {len(first)} values: {name} is "
                f"{first.get(name, 'missing')} and {other.get(name, 'missing')}",
                "load the same weights on every rank, freeze and adapt them alike, remove gradients "
                "(model.zero_grad()), call torch.manual_seed(0) before a new model is built, or build it on meta and "
                "call meshtrain.initialize",
            )


def _describe(parameter: nn.Parameter) -> str:
    dtype = dtype_name(parameter.dtype)
    use = "trained" if parameter.requires_grad else "frozen"
    described = f"{dtype} {tuple(parameter.shape)} {use}, hash {tensor_digest(parameter, most_elements=SAMPLED)}"
    if parameter.grad is None:
        return described
    return f"{described}, gradient {tensor_digest(parameter.grad, most_elements=SAMPLED)}"


@dataclass(frozen=True)
class Successors:
    """What a parameter of the stock model has become on this process.

    Attributes:
        name: stock FQN.
        shape: of the full parameter.
        entry: how it is stored in parts, if it is.
        parameters: name of a part (or its own) -> the parameters on this process: none, one, or
            both copies of a tied weight.
    """

    name: str
    shape: torch.Size
    entry: FusedParameter | None
    parameters: Mapping[str, Sequence[nn.Parameter]]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (successor for successors in self.parameters.values() for successor in successors)

    def shards(self, full: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every successor with its own view of a tensor of the full parameter's shape."""
        parts = split_parts({self.name: full}, [self.entry] if self.entry else [])
        for part, successors in self.parameters.items():
            for successor in successors:
                yield successor, parts[part][tuple(local_ranges(successor))]


@torch.no_grad()
def put(values: Values, pipeline: Pipeline) -> dict[nn.Parameter, Successors]:
    """Copy values and gradients into the shards of this process, and free the originals one by one.

    Returns:
        Old parameter -> what it has become here.
    """
    fused = {entry.name: entry for entry in pipeline.fused}
    here = _by_canonical_name(pipeline)
    successors = {}
    for name, old in values.parameters.items():
        entry = fused.get(name)
        parts = entry.parts if entry else (name,)
        successors[old] = Successors(name, old.shape, entry, {part: here.get(part, ()) for part in parts})
        if not values.is_meta:
            for successor, value in successors[old].shards(old.detach()):
                local_tensor(successor.detach()).copy_(value)
            if old.grad is not None:
                for successor, part in successors[old].shards(old.grad):
                    successor.grad = laid_out_as(part.to(successor.device, successor.dtype, copy=True), successor)
                old.grad = None
            # An optimizer may hold the old parameter forever.
            old.data = old.data.new_empty(0)
    return successors


def put_buffers(values: Values, pipeline: Pipeline) -> None:
    """Copy the buffers, which every stage has in full."""
    for stage in pipeline.stages:
        if values.grown_length:
            apply_sequence_length(stage.model, values.grown_length)
        for name, buffer in stage.model.named_buffers():
            if name in values.buffers:
                buffer.copy_(values.buffers[name])


def _by_canonical_name(pipeline: Pipeline) -> dict[str, list[nn.Parameter]]:
    canonical = pipeline.canonical_names()
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in pipeline.named_parameters():
        found.setdefault(canonical[name], []).append(parameter)
    return found
