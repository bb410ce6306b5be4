"""Find out what a module counts or receives for each head, by computing with a part of the heads.

A trial runs the model as one of two processes would: the projections of a cut compute their part.
It holds if each projection with cut inputs receives exactly its part of what it received before.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.compat.nn import become, parameter_table, set_forward
from meshtrain.compat.transformers import note_reads
from meshtrain.models.layer_config import values_in_layers
from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.cut.probe import MISFITS
from meshtrain.parallel.tensor.dataflow.blocks import Cut, Part
from meshtrain.parallel.tensor.dataflow.reach import Call, Recording
from meshtrain.parallel.tensor.heads import has_heads, named_inputs, see_own_inputs
from meshtrain.parallel.tensor.modules import see_own_heads

WAYS = 2
MOST_ATTRIBUTES = 4
# Norms of transformers compute in float32.
CLOSE = 1e-5
Attribute = tuple[str, str]
"""Pattern of a module, and the name of an attribute."""


class _DiffersError(Exception):
    """Ends a trial in which a projection did not receive its part."""


@dataclass(frozen=True)
class Local:
    """What the modules around a cut must see of one process only.

    Attributes:
        attributes: that count heads or channels.
        inputs: that have values for every head.
    """

    attributes: tuple[Attribute, ...]
    inputs: tuple[Attribute, ...] = ()


def find_local(
    model: PreTrainedModel, inputs: Mapping[str, Any], recording: Recording, cuts: Sequence[Cut]
) -> Local | None:
    """Return what must be one process's part: the fewest attributes that suffice, then inputs.

    Args:
        model: with values.
        inputs: with which it was recorded.
        recording: of the model.
        cuts: of the same kind, in all layers that have it.

    Returns:
        None if nothing makes the modules compute with a part.
    """

    def holds(attributes: tuple[Attribute, ...], of_heads: tuple[Attribute, ...]) -> bool:
        local = Local(attributes, of_heads)
        return all(_holds(model, inputs, recording, cuts, rank, local) for rank in range(WAYS))

    candidates, of_heads = _candidates(model, inputs, cuts), _inputs_of_heads(model, inputs, cuts)
    for number in range(min(MOST_ATTRIBUTES, len(candidates)) + 1):
        # All such inputs or none, because a module needs its heads of each that it uses.
        for chosen, given in itertools.product(
            itertools.combinations(candidates, number), dict.fromkeys(((), of_heads))
        ):
            if holds(chosen, given):
                return Local(chosen, given)
    return None


def _inputs_of_heads(model: PreTrainedModel, inputs: Mapping[str, Any], cuts: Sequence[Cut]) -> tuple[Attribute, ...]:
    """Return the inputs with values for every head, of the innermost modules that receive them."""
    heads = head_count(model)
    if heads is None:
        return ()
    found: dict[tuple[str, str], None] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = named_inputs(module, args, kwargs)
        found.update(dict.fromkeys((name, kind) for kind, value in given.items() if has_heads(value, heads)))

    # A copy, because some models replace modules when they run first.
    noting = copy.deepcopy(model)
    for name in {name for cut in cuts for name in modules_around(cut)}:
        noting.get_submodule(name).register_forward_pre_hook(partial(note, name), with_kwargs=True)
    with torch.no_grad():
        noting(**inputs, use_cache=False)
    innermost = [
        (name, kind)
        for name, kind in found
        if not any(other.startswith(f"{name}.") and kind == same for other, same in found)
    ]
    return tuple(dict.fromkeys((as_pattern(name), kind) for name, kind in sorted(innermost)))


def head_count(model: PreTrainedModel) -> int | None:
    """Return the number of attention heads, None if the layers differ in it or have none."""
    counts = values_in_layers(model.config, "num_attention_heads")
    return counts[0] if len(counts) == 1 and isinstance(counts[0], int) else None


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
    local: Local,
) -> bool:
    copied = _copy_of_modules(model)
    modules = dict(copied.named_modules())
    around = {name for cut in cuts for name in modules_around(cut)}
    for name, (pattern, attribute) in itertools.product(sorted(around), local.attributes):
        if as_pattern(name) == pattern:
            _halve(modules[name], attribute)
    for name, (pattern, kind) in itertools.product(sorted(around), local.inputs):
        if as_pattern(name) == pattern:
            heads = head_count(model)
            assert heads is not None, "inputs of heads that nothing counts"
            see_own_inputs(modules[name], [kind], heads=heads, rank=rank, tp=WAYS)
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
        owner = cut.owner_of(name)
        if not cut.contains_projection(owner):
            alone.add(owner)
        elif dim is not None:
            table, kind = parameter_table(modules[owner]), name.rpartition(".")[2]
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
    # The model may change what it gets in place.
    return call.returned.detach().clone()
