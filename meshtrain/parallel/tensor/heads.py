"""Make attention modules count and read only the heads of one process."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.parallel.tensor.requirements import attention_of
from meshtrain.parallel.tensor.rules import TensorRules, local_count
from meshtrain.parallel.tensor.styles import STYLES


def apply_local_heads(model: PreTrainedModel, rules: TensorRules, *, rank: int, tp: int) -> None:
    """Change head counts and inputs of attention modules to the heads of one process, in place.

    Args:
        model: of the stage.
        rules: of the complete model.
        rank: of the process, among the `tp` that share the heads.
        tp: number of processes that share the heads.
    """
    config = model.config.get_text_config()
    for name, module in model.named_modules():
        for attribute in rules.local_attributes.get(name, []):
            _localize(module, attribute, tp)
        if inputs := rules.local_inputs.get(name):
            see_own_inputs(module, inputs, heads=config.num_attention_heads, rank=rank, tp=tp)
    modules = dict(model.named_modules())
    shared = (name for name, style in rules.styles.items() if STYLES[style].gives == "one head" and name in modules)
    for name in dict.fromkeys(attention_of(model, name) for name in shared):
        if name is not None:
            groups = modules[name].num_key_value_groups * config.num_key_value_heads // tp
            modules[name].num_key_value_groups = groups


def see_own_inputs(module: nn.Module, names: Sequence[str], *, heads: int, rank: int, tp: int) -> None:
    """Give a module only one process's heads of some inputs.

    Args:
        module: changed in place.
        names: of the inputs: see `has_heads`.
        heads: of the complete model.
        rank: of the process, among the `tp` that share the heads.
        tp: number of processes that share the heads.
    """
    module.register_forward_pre_hook(partial(_own_heads, names, heads, rank, tp), with_kwargs=True)


def named_inputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a call of a module by name."""
    return {**dict(zip(inspect.signature(type(module).forward).parameters, (module, *args), strict=False)), **kwargs}


def has_heads(value: Any, heads: int) -> bool:
    """Return whether an input has values for every head.

    It is then (batch * heads, ..., ...), (heads, ..., ...) or (batch, heads, ..., ...).
    """
    if not isinstance(value, Tensor) or value.dim() not in (3, 4):
        return False
    return value.shape[1] == heads if value.dim() == 4 else value.shape[0] % heads == 0


def _localize(module: nn.Module, attribute: str, tp: int) -> None:
    owner, _, name = attribute.rpartition(".")
    if owner:
        # All modules share the configuration, so this one gets a copy for its part of the heads.
        setattr(module, owner, copy.copy(getattr(module, owner)))
    target: Any = getattr(module, owner) if owner else module
    setattr(target, name, local_count(name, getattr(target, name), tp))


def _own_heads(
    names: Sequence[str],
    heads: int,
    rank: int,
    tp: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    forward: Callable[..., Any] = type(module).forward
    positions = {name: index - 1 for index, name in enumerate(inspect.signature(forward).parameters)}
    values = list(args)
    for name in names:
        # Some inputs are in `**kwargs` of the forward.
        at = positions.get(name, len(values))
        if at < len(values):
            values[at] = _slice_heads(values[at], heads, rank, tp)
        elif name in kwargs:
            kwargs = {**kwargs, name: _slice_heads(kwargs[name], heads, rank, tp)}
    return tuple(values), kwargs


def _slice_heads(value: Tensor | None, heads: int, rank: int, tp: int) -> Tensor | None:
    """Return this process's heads of (batch * heads, ...) or (batch, heads, ..., ...).

    None, and a 4-D tensor with one head for all, are returned as they are.
    """
    if value is None:
        return None
    count = heads // tp
    if value.dim() == 4:
        return value if value.shape[1] == 1 else value.narrow(1, rank * count, count)
    return value.unflatten(0, (-1, heads)).narrow(1, rank * count, count).flatten(0, 1)
