"""Random initialization: the same values on every mesh, without a seed checkpoint.

Hugging Face's own rules define the distribution of each parameter. Only the drawing is replaced:
values are drawn tile by tile.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from meshtrain.compat.initialization import (
    computed_in,
    counted_as,
    forget_marks,
    functions_replaced,
    mark_initialized,
    rules_wrapped,
)
from meshtrain.compat.nn import parameter_table
from meshtrain.errors import ModelError
from meshtrain.models.adapters import initialize_adapters, without_adapters
from meshtrain.models.build import stock_class, stock_like
from meshtrain.models.constructed import ConstructedTensors
from meshtrain.models.fused import UnfusedProjection
from meshtrain.models.init_rules import Filler, Rules
from meshtrain.models.layout import local_indices, local_tensor
from meshtrain.models.rotary import forget_sequences
from meshtrain.models.tiles import seeded_by


@torch.no_grad()
def materialize(
    model: nn.Module,
    device: torch.device,
    *,
    tied: Mapping[str, str],
    parameter_device: torch.device | None = None,
) -> None:
    """Allocate memory on `device` for a meta model, without values.

    Args:
        model: already cut and sharded. Each process allocates only its shards.
        device: of the buffers, and of the parameters unless these are offloaded.
        tied: name of a tied parameter -> name of its original. Where `model` holds both, they are
            made one parameter again, because `to_empty` separates them.
        parameter_device: of the parameters, if they are offloaded.
    """
    model.to_empty(device=parameter_device or device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for copied, source in tied.items():
        if copied in parameters and source in parameters:
            owner, _, kind = copied.rpartition(".")
            model.get_submodule(owner).register_parameter(kind, parameters[source])
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, *, seed: int, names: Mapping[str, str]) -> None:
    """Fill all parameters and buffers of a materialized model or stage with initial values.

    The values follow the rules of Hugging Face, and those of peft for adapters.

    Args:
        model: its parameters may be DTensors. Stubs without parameters may replace modules that
            other stages hold. What is on the meta device stays as it is.
        seed: of the run.
        names: parameter name in the stock model -> FQN that seeds its values. The copy of a tied
            weight on another stage uses the name of the original, so both are equal without
            communication.

    Raises:
        ModelError: for a parameter that neither a rule nor a constructor fills.
    """
    with without_adapters(model) as adapters:
        _initialize_stock(model, seed, names)
        initialize_adapters(model, adapters, seed=seed)


def _initialize_stock(model: PreTrainedModel, seed: int, names: Mapping[str, str]) -> None:
    parameters = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    filler = Filler(seed, {id(parameter): names[name] for name, parameter in parameters.items()})
    with _originals_only(model):
        rules = Rules(model, seed, filler)
        with functions_replaced(filler.replace, filler.copy), rules_wrapped(rules.run):
            _apply_hf_rules(model)
    _fill_as_constructed(
        model, seed, filler, {names[n]: p for n, p in parameters.items() if id(p) not in filler.filled}
    )
    _zero_padding_rows(model)
    _complete_buffers(model)


@contextmanager
def _originals_only(model: PreTrainedModel) -> Iterator[None]:
    """Hide tied weights from their second places, such as the head, while the block runs.

    In the stock model, tied weights have the values that the rules give to the original. A rule
    fills them by their place: it belongs to their module, or to any module around it.
    """
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = {copied: source for copied, source in model.all_tied_weights_keys.items() if {copied, source} <= held}
    # One module may have both names. Its weight then has one place.
    firsts = {_place(model, source) for source in ties.values()}
    seconds = {_place(model, copied) for copied in ties} - firsts
    parameters = [(parameter_table(module), kind, module.get_parameter(kind)) for module, kind in seconds]
    for table, kind, parameter in parameters:
        hidden = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        table[kind] = nn.Parameter(hidden, requires_grad=False)
    try:
        yield
    finally:
        for table, kind, parameter in parameters:
            table[kind] = parameter


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, kind = name.rpartition(".")
    return model.get_submodule(owner), kind


def _fill_as_constructed(
    model: PreTrainedModel, seed: int, filler: Filler, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Fill the parameters that no rule fills with what the constructor of the model gives them."""
    if not parameters:
        return
    constructed = ConstructedTensors(lambda: stock_like(model, torch.float32))
    parts = {id(parameter) for parameter in parameters.values()}
    for name, kind, module in _fused(model):
        if name in constructed and any(id(part.get_parameter(kind)) in parts for part in module.children()):
            with seeded_by(f"{seed}|{name}"):
                for parameter, value in module.split(kind, constructed.values(name)):
                    filler.keep_part(parameter, value)
    parameters = {name: parameter for name, parameter in parameters.items() if id(parameter) not in filler.filled}
    unknown = [name for name in parameters if name not in constructed]
    if unknown:
        raise ModelError(
            f"{stock_class(model).__name__} has no initialization rule for {', '.join(unknown[:5])}",
            "start from pretrained weights instead",
        )
    for name, parameter in parameters.items():
        with seeded_by(f"{seed}|{name}"):
            filler.keep_part(parameter, constructed.values(name))


def _fused(model: nn.Module) -> Iterator[tuple[str, str, UnfusedProjection]]:
    """Yield the stock name of each parameter that is in parts, its kind, and the module."""
    for name, module in model.named_modules():
        if isinstance(module, UnfusedProjection):
            for kind, _ in next(module.children()).named_parameters():
                yield f"{name}.{kind}", kind, module


@torch.no_grad()
def restore_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that checkpoints do not contain, such as rotary frequencies.

    The parameters are not changed, not even by a rule that fills them without torch's init
    functions.
    """
    for parameter in model.parameters():
        mark_initialized(parameter)
    filler = Filler(0, {id(parameter): name for name, parameter in model.named_parameters()})
    rules = Rules(model, 0, filler, keeps=False)
    with functions_replaced(filler.replace, filler.copy), rules_wrapped(rules.run):
        _apply_hf_rules(model)
    _complete_buffers(model)


def _apply_hf_rules(model: PreTrainedModel) -> None:
    forget_marks(*model.modules())
    forget_sequences(model)
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    with counted_as(model, stock_class(model)), computed_in(dtype):
        model.initialize_weights()


def _complete_buffers(model: PreTrainedModel) -> None:
    """Fill the buffers that no rule fills with what the constructor of the model gives them."""
    own = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    empty = {name: buffer for name, buffer in own.items() if buffer.is_floating_point() and buffer.isnan().any()}
    if not empty:
        return
    constructed = ConstructedTensors(lambda: stock_like(model))
    for name, buffer in empty.items():
        value = constructed.values(name) if name in constructed else None
        if value is None or bool(value.isnan().any()):
            raise ModelError(
                f"{stock_class(model).__name__} has no rule for its buffer {name}, so it cannot be built on meta"
            )
        buffer.copy_(value)


def _zero_padding_rows(model: nn.Module) -> None:
    # transformers zeroes the row only in a copy of a DTensor, and at pp = 1 the rule of a tied head
    # runs after that of the embedding. The copy of the embedding in a head on another stage has no
    # padding index of its own, so the cut sets it to that of the embedding.
    for module in model.modules():
        weight, padding_index = parameter_table(module).get("weight"), getattr(module, "padding_idx", None)
        if weight is not None and padding_index is not None:
            rows = local_indices(weight)[0]
            local_tensor(weight)[rows == padding_index] = 0
