"""Fused projections: one parameter in the stock model, several in ours.

A fused projection (GPT-2's `c_attn`) cannot be sharded as it stands: a contiguous shard of [q | k | v] mixes them, and
torch's `_StridedShard` is silently wrong for it under FSDP2. So its parts become children of their own, on every mesh,
tp = 1 included, and this file holds the two-way mapping to the stock names.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshtrain.errors import PlanError
from meshtrain.models.patterns import match_modules


@dataclass(frozen=True)
class FusedParameter:
    """A stock parameter that we keep in equal parts.

    Attributes:
        name: the stock FQN, such as "transformer.h.0.attn.c_attn.weight".
        parts: our FQNs in order, such as "transformer.h.0.attn.c_attn.q.weight".
        dim: the tensor dimension along which the parts are joined.
    """

    name: str
    parts: tuple[str, ...]
    dim: int


class UnfusedProjection(nn.Module):
    """Stands where a fused projection stood: one child per part, outputs joined as the model expects them."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        """Project `x` (batch, seq, hidden) by every part and join the results along the last dimension."""
        return torch.cat([part(x) for part in self.children()], dim=-1)


def unfuse(model: nn.Module, fused: Mapping[str, Sequence[str]]) -> list[FusedParameter]:
    """Replace every fused projection by its parts, values included.

    Args:
        model: a stock model; changed in place.
        fused: module pattern -> names of its equal parts.

    Returns:
        One entry per fused parameter, in the order of the model.

    Raises:
        PlanError: for a pattern that matches nothing, a module that is no projection, or parts that do not divide it.
    """
    found = match_modules(model, fused, "tensor.fused")
    entries = []
    for name, part_names in found.items():
        module = model.get_submodule(name)
        if not isinstance(module, (nn.Linear, Conv1D)):
            raise PlanError(f"tensor.fused: {name} is a {type(module).__name__}; only Linear and Conv1D have parts")
        dim = 0 if isinstance(module, nn.Linear) else 1
        size = module.weight.shape[dim]
        if size % len(part_names):
            raise PlanError(
                f"tensor.fused: {name} has {size} outputs, which {len(part_names)} equal parts do not divide"
            )
        parts = {part: _take_part(module, dim, index, len(part_names)) for index, part in enumerate(part_names)}
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, UnfusedProjection(parts))
        entries += [
            FusedParameter(
                f"{name}.{kind}", tuple(f"{name}.{part}.{kind}" for part in part_names), dim if kind == "weight" else 0
            )
            for kind, _ in module.named_parameters()
        ]
    return entries


def split_parts(stock: Mapping[str, Tensor], fused: Iterable[FusedParameter]) -> dict[str, Tensor]:
    """Return whole tensors under our names: every fused one in its parts."""
    result = dict(stock)
    for entry in fused:
        result.update(zip(entry.parts, result.pop(entry.name).chunk(len(entry.parts), entry.dim), strict=True))
    return result


def join_parts(ours: Mapping[str, Tensor], fused: Iterable[FusedParameter]) -> dict[str, Tensor]:
    """Return whole tensors under the stock names; every part of what is fused must be there."""
    result = dict(ours)
    for entry in fused:
        result[entry.name] = torch.cat([result.pop(part) for part in entry.parts], entry.dim)
    return result


def _take_part(module: nn.Linear | Conv1D, dim: int, index: int, num_parts: int) -> nn.Module:
    # Hooks and buffers of its own: a shallow copy would share them with the other parts.
    part = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    for kind, parameter in module.named_parameters():
        values = parameter.detach().chunk(num_parts, dim if kind == "weight" else 0)[index].clone()
        part.register_parameter(kind, nn.Parameter(values))
    width = module.weight.shape[dim] // num_parts
    if isinstance(part, nn.Linear):
        part.out_features = width
    else:
        part.nf = width
    return part
