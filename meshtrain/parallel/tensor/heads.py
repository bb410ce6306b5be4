"""Make modules count, read and compute only the heads or the part of one process."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.nn import parameter_table
from meshtrain.parallel.tensor.context import full_biases
from meshtrain.parallel.tensor.head_share import Heads, heads_of, local_value, uneven_heads
from meshtrain.parallel.tensor.modules import slices_of, width_of
from meshtrain.parallel.tensor.requirements import attention_of
from meshtrain.parallel.tensor.rules import TensorRules
from meshtrain.parallel.tensor.style_row import StyleRow
from meshtrain.parallel.tensor.styles import STYLES


def apply_local_heads(model: PreTrainedModel, rules: TensorRules, *, rank: int, tp: int) -> None:
    """Change head counts and inputs of attention modules to the heads of one process, in place.

    Args:
        model: of the stage.
        rules: of the complete model.
        rank: of the process, among the `tp` that share the heads.
        tp: number of processes that share the heads.
    """
    heads = heads_of(model.config)
    uneven = uneven_heads(model.config, tp)
    for name, module in model.named_modules():
        for attribute in rules.local_attributes.get(name, []):
            _localize(module, attribute, uneven, rank, tp)
        if inputs := rules.local_inputs.get(name):
            count = model.config.get_text_config().num_attention_heads
            see_own_inputs(module, inputs, heads=count, rank=rank, tp=tp)
    modules = dict(model.named_modules())
    shared = (name for name, style in rules.styles.items() if STYLES[style].gives == "own keys" and name in modules)
    for name in dict.fromkeys(attention_of(model, name) for name in shared):
        if name is not None and heads is not None:
            modules[name].num_key_value_groups = heads.of(rank, tp).groups


def take_own_parameters(name: str, module: nn.Module, dims: Mapping[str, int], rank: int, tp: int) -> None:
    """Replace a module's own parameters that are sharded by those of one process, in place.

    Args:
        name: of the module.
        module: with full parameters.
        dims: name of a sharded parameter -> the dimension that is sharded.
        rank: of the process.
        tp: number of processes.
    """
    table = parameter_table(module)
    for kind, parameter in list(module.named_parameters(recurse=False)):
        if (dim := dims.get(f"{name}.{kind}")) is not None:
            table[kind] = nn.Parameter(parameter.detach().chunk(tp, dim)[rank], parameter.requires_grad)


def drop_full_biases(name: str, module: nn.Module, dims: Mapping[str, int]) -> None:
    """Replace the biases of stacked experts that another process adds by zeros, in place.

    Args:
        name: of the module.
        module: with full parameters, or those of one process.
        dims: name of a sharded parameter -> the dimension that is sharded.
    """
    table = parameter_table(module)
    for kind in full_biases(name, module, dims):
        bias = module.get_parameter(kind)
        table[kind] = nn.Parameter(torch.zeros_like(bias), bias.requires_grad)


def local_slices(
    module: nn.Module, row: StyleRow, heads: Heads | None, rank: int, tp: int
) -> tuple[Sequence[slice], Sequence[slice]]:
    """Return which inputs and outputs of a projection one process has.

    Args:
        module: with its full weight.
        row: of its style.
        heads: of the model, if they are known.
        rank: of the process.
        tp: number of processes.
    """
    inputs, outputs = width_of(module, "inputs"), width_of(module, "outputs")
    at_inputs, at_outputs = [slice(0, inputs)], [slice(0, outputs)]
    if row.takes == "part":
        at_inputs = slices_of([rank], inputs // tp)
    if row.gives == "part":
        at_outputs = slices_of([rank], outputs // tp)
    if heads is not None:
        share = heads.of(rank, tp)
        if row.takes == "own heads":
            at_inputs = slices_of(share.queries, inputs // heads.queries)
        if row.gives == "own heads":
            at_outputs = slices_of(share.queries, outputs // heads.queries)
        elif row.gives == "own keys":
            at_outputs = slices_of(share.keys, outputs // heads.keys)
    return at_inputs, at_outputs


def local_widths(module: nn.Module, row: StyleRow, heads: Heads | None, rank: int, tp: int) -> tuple[int, int]:
    """Return how many inputs and outputs of a projection one process has; see `local_slices`."""
    at_inputs, at_outputs = local_slices(module, row, heads, rank, tp)
    return sum(at.stop - at.start for at in at_inputs), sum(at.stop - at.start for at in at_outputs)


def see_own_inputs(module: nn.Module, names: Sequence[str], *, heads: int, rank: int, tp: int) -> None:
    """Give a module only one process's heads of some inputs.

    Args:
        module: changed in place.
        names: of the inputs: see `has_heads`.
        heads: of the complete model.
        rank: of the process, among the `tp` that share the heads.
        tp: number of processes that share the heads.
    """
    share = Heads(heads, heads).of(rank, tp).queries
    module.register_forward_pre_hook(partial(_own_heads, names, heads, share), with_kwargs=True)


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


def _localize(module: nn.Module, attribute: str, heads: Heads | None, rank: int, tp: int) -> None:
    owner, _, name = attribute.rpartition(".")
    if owner:
        # All modules share the configuration, so this one gets a copy for its part of the heads.
        setattr(module, owner, copy.copy(getattr(module, owner)))
    target: Any = getattr(module, owner) if owner else module
    setattr(target, name, local_value(getattr(target, name), heads, rank, tp))


def _own_heads(
    names: Sequence[str],
    heads: int,
    share: range,
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
            values[at] = _slice_heads(values[at], heads, share)
        elif name in kwargs:
            kwargs = {**kwargs, name: _slice_heads(kwargs[name], heads, share)}
    return tuple(values), kwargs


def _slice_heads(value: Tensor | None, heads: int, share: range) -> Tensor | None:
    """Return this process's heads of (batch * heads, ...) or (batch, heads, ..., ...).

    None, and a 4-D tensor with one head for all, are returned as they are.
    """
    if value is None:
        return None
    if value.dim() == 4:
        return value if value.shape[1] == 1 else value[:, share.start : share.stop]
    return value.unflatten(0, (-1, heads))[:, share.start : share.stop].flatten(0, 1)
