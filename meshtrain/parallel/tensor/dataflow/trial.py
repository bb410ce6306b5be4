"""Find out which numbers of a module count heads or channels, by computing with a part of them.

A trial runs the model as one of two processes would: the projections of a cut compute their part.
It holds if each projection with cut inputs receives exactly its part of what it received before.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.compat.nn import become, parameter_table, set_forward
from meshtrain.compat.transformers import note_reads
from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.cut.probe import MISFITS
from meshtrain.parallel.tensor.dataflow.blocks import Cut, Part
from meshtrain.parallel.tensor.dataflow.reach import Call, Recording
from meshtrain.parallel.tensor.modules import see_own_heads

WAYS = 2
MOST_ATTRIBUTES = 4
# Norms of transformers compute in float32.
CLOSE = 1e-5
Attribute = tuple[str, str]
"""Pattern of a module, and the name of an attribute."""


class _DiffersError(Exception):
    """Ends a trial in which a projection did not receive its part."""


def local_attributes(
    model: PreTrainedModel, inputs: Mapping[str, Any], recording: Recording, cuts: Sequence[Cut]
) -> tuple[Attribute, ...] | None:
    """Return the attributes that must count one process's part, the fewest that suffice.

    Args:
        model: with values.
        inputs: with which it was recorded.
        recording: of the model.
        cuts: of the same kind, in all layers that have it.

    Returns:
        None if no attributes make the modules compute with a part.
    """
    candidates = _candidates(model, inputs, cuts)
    for number in range(min(MOST_ATTRIBUTES, len(candidates)) + 1):
        for chosen in itertools.combinations(candidates, number):
            if all(_holds(model, inputs, recording, cuts, rank, chosen) for rank in range(WAYS)):
                return chosen
    return None


def _candidates(model: PreTrainedModel, inputs: Mapping[str, Any], cuts: Sequence[Cut]) -> list[Attribute]:
    """Return the whole numbers that the modules around a cut read, and that its blocks divide."""
    noting = _copy_of_modules(model)
    around = {name for cut in cuts for name in modules_around(cut)}
    read: dict[Attribute, None] = {}
    for name in sorted(around):
        module: Any = noting.get_submodule(name)
        if isinstance(getattr(module, "config", None), PretrainedConfig):
            module.config = note_reads(
                module.config, partial(_note, read, vars(module.config), as_pattern(name), "config.")
            )
        _note_reads(module, partial(_note, read, vars(module), as_pattern(name), ""))
    with torch.no_grad():
        noting(**inputs, use_cache=False)
    return [*read]


def _copy_of_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with the same parameters and configurations, which a trial only replaces."""
    configs = [
        module.config for module in model.modules() if isinstance(getattr(module, "config", None), PretrainedConfig)
    ]
    return copy.deepcopy(model, {id(shared): shared for shared in (*model.parameters(), *configs)})


def modules_around(cut: Cut) -> Iterator[str]:
    """Yield the modules that contain the projections or parameters of a cut, and single layers."""
    inside = [*cut.columns, *cut.rows]
    for name in (*inside, *cut.parameters):
        owner = name.rpartition(".")[0]
        while owner and not owner.rpartition(".")[2].isdigit():
            yield owner
            owner = owner.rpartition(".")[0]
        if owner:
            yield owner


def _note(read: dict[Attribute, None], values: Mapping[str, Any], pattern: str, prefix: str, name: str) -> None:
    value = values.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value > 1 and value % WAYS == 0:
        read.setdefault((pattern, f"{prefix}{name}"))


def _note_reads(module: nn.Module, note: Callable[[str], None]) -> None:
    kind = type(module)

    def read(self: nn.Module, name: str) -> Any:
        note(name)
        return kind.__getattribute__(self, name)

    become(module, type(kind.__name__, (kind,), {"__getattribute__": read}))


def _holds(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    recording: Recording,
    cuts: Sequence[Cut],
    rank: int,
    attributes: Sequence[Attribute],
) -> bool:
    copied = _copy_of_modules(model)
    modules = dict(copied.named_modules())
    around = {name for cut in cuts for name in modules_around(cut)}
    for name, (pattern, attribute) in itertools.product(sorted(around), attributes):
        if as_pattern(name) == pattern:
            _halve(modules[name], attribute)
    for cut in cuts:
        for name, parts in cut.columns.items():
            module = modules[name]
            set_forward(module, partial(_project_part, module.forward, parts, rank))
        for name in cut.rows:
            set_forward(modules[name], partial(_compare_part, iter(recording.calls[name]), rank))
        _cut_parameters(cut, modules, rank)
    try:
        with torch.no_grad():
            copied(**inputs, use_cache=False)
    except (_DiffersError, *MISFITS):
        return False
    return True


def _cut_parameters(cut: Cut, modules: Mapping[str, nn.Module], rank: int) -> None:
    """Let the modules of a cut that are no projections compute with their part of parameters."""
    alone = set()
    for name, dim in cut.parameters.items():
        owner, _, kind = name.rpartition(".")
        if not any(projection.startswith(f"{owner}.") for projection in (*cut.columns, *cut.rows)):
            alone.add(owner)
        elif dim is not None:
            table = parameter_table(modules[owner])
            table[kind] = nn.Parameter(_part(table[kind].detach(), dim, rank))
    for owner in alone:
        see_own_heads(modules[owner], rank, WAYS)


def _halve(module: nn.Module, attribute: str) -> None:
    owner, _, name = attribute.rpartition(".")
    if owner:
        setattr(module, owner, copy.copy(getattr(module, owner)))
    target: Any = getattr(module, owner) if owner else module
    setattr(target, name, getattr(target, name) // WAYS)


def _part(tensor: Tensor, dim: int, rank: int) -> Tensor:
    return tensor.chunk(WAYS, dim)[rank]


def _project_part(
    forward: Callable[..., Tensor], parts: Sequence[Part], rank: int, *args: Any, **kwargs: Any
) -> Tensor:
    outputs = forward(*args, **kwargs).split([part.width for part in parts], -1)
    own = [_part(x, -1, rank) if part.kind == "cut" else x for x, part in zip(outputs, parts, strict=True)]
    return torch.cat(own, -1)


def _compare_part(calls: Iterator[Call], rank: int, received: Tensor) -> Tensor:
    call = next(calls)
    wanted = _part(call.received.detach(), -1, rank)
    if received.shape != wanted.shape or not torch.allclose(received, wanted, rtol=CLOSE, atol=CLOSE):
        raise _DiffersError
    return call.returned.detach()
