"""Fused projections: one parameter in the stock model, several in meshtrain's.

A fused projection (GPT-2's `c_attn`) cannot be sharded directly, because a contiguous shard of
[q | k | v] mixes the three. torch's `_StridedShard` computes wrong results for it under FSDP2,
without an error. So its parts become separate children on every mesh, including tp = 1. This file
holds the mapping to the stock names and back. In the stacked weights of experts, (experts, gate and
up, hidden), the parts only get a separate dimension, which needs no copy.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.nn import hook_tables, mix_in, parameter_table
from meshtrain.errors import PlanError
from meshtrain.models.patterns import as_pattern, match_names

Parts = Sequence[str] | Mapping[str, int | str]
KEY = "tensor.fused"


@dataclass(frozen=True)
class FusedParameter:
    """A stock parameter that meshtrain keeps in parts.

    Attributes:
        name: the stock FQN, such as "transformer.h.0.attn.c_attn.weight".
        parts: the FQNs of the parts in order, such as "transformer.h.0.attn.c_attn.q.weight".
        dim: the tensor dimension along which the parts are joined.
        sizes: of the parts along `dim`; empty: they are equal.
        stacked: number of equal parts that stay one parameter, with a separate dimension for the
            parts at `dim`; 0 if the parts are separate parameters.
    """

    name: str
    parts: tuple[str, ...]
    dim: int
    sizes: tuple[int, ...] = ()
    stacked: int = 0

    def split(self, stock: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the parts by name."""
        if self.stacked:
            return {self.parts[0]: stock.unflatten(self.dim, (self.stacked, -1))}
        pieces = stock.split(list(self.sizes), self.dim) if self.sizes else stock.chunk(len(self.parts), self.dim)
        return dict(zip(self.parts, pieces, strict=True))

    def places(self, shapes: Sequence[Sequence[int]]) -> dict[str, tuple[list[int], int]]:
        """Return for each part by name the shape of the stock tensor, and where the part begins.

        Args:
            shapes: of all parts, in order.
        """
        widths = [shape[self.dim] for shape in shapes]
        stock = [*shapes[0][: self.dim], sum(widths), *shapes[0][self.dim + 1 :]]
        return {part: (stock, sum(widths[:index])) for index, part in enumerate(self.parts)}

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the stock tensor, joined from the tensors of all parts in order."""
        return ours[0].flatten(self.dim, self.dim + 1) if self.stacked else torch.cat(list(ours), self.dim)


class UnfusedProjection(nn.Module):
    """The replacement of a fused projection: one child per part, with the outputs joined.

    Attributes:
        at_once: whether it computes as the stock projection does, with one large product in place
            of several. The parts must be whole then.
        written: while a rule of initialization runs, the stock parameters that it asks for, in
            full; None otherwise.
    """

    at_once: bool
    written: dict[str, Tensor] | None

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.at_once, self.written = False, None
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        """Project `x` (batch, seq, hidden) by every part; join the results along the last dim."""
        if not self.at_once:
            return torch.cat([part(x) for part in self.children()], dim=-1)
        weight, bias = self._joined("weight"), self._joined("bias")
        assert weight is not None
        return torch.nn.functional.linear(x, weight.T if self._joined_dim("weight") else weight, bias)

    def _joined(self, kind: str) -> Tensor | None:
        tensors = [getattr(part, kind) for part in self.children()]
        return None if tensors[0] is None else torch.cat(tensors, self._joined_dim(kind))

    def __getattr__(self, name: str) -> Any:
        written = vars(self).get("written")
        if written is None or name not in ("weight", "bias"):
            return super().__getattr__(name)
        if getattr(next(self.children()), name) is None:
            return None
        return written.setdefault(name, torch.empty(self.full_shape(name), dtype=torch.float32))

    def full_shape(self, kind: str) -> torch.Size:
        """Return the shape of the stock parameter, `weight` or `bias`."""
        shapes = [part.get_parameter(kind).shape for part in self.children()]
        dim = self._joined_dim(kind)
        return torch.Size([sum(shape[dim] for shape in shapes) if at == dim else n for at, n in enumerate(shapes[0])])

    def split(self, kind: str, value: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameter of each part, and its values, from those of the stock parameter."""
        parameters = [part.get_parameter(kind) for part in self.children()]
        dim = self._joined_dim(kind)
        values = value.split([parameter.shape[dim] for parameter in parameters], dim)
        return list(zip(parameters, values, strict=True))

    def _joined_dim(self, kind: str) -> int:
        return 1 if kind == "weight" and isinstance(next(self.children()), Conv1D) else 0


def compute_at_once(model: nn.Module) -> None:
    """Let fused projections compute as the stock ones do, where no part has hooks or is wrapped.

    Args:
        model: unfused, and not cut by tensor parallelism.
    """
    for module in model.modules():
        if isinstance(module, UnfusedProjection):
            parts = list(module.children())
            module.at_once = all(type(part) in (nn.Linear, Conv1D) and not any(hook_tables(part)) for part in parts)


def unfuse(model: nn.Module, fused: Mapping[str, Parts]) -> list[FusedParameter]:
    """Replace every fused projection by its parts, including their values.

    Args:
        model: a stock model. It is changed in place.
        fused: pattern of a module or of a stacked parameter -> names of its equal parts, or
            part -> share. A share is a number, or the name of a number in the model's
            configuration.

    Returns:
        One entry per fused parameter: those of modules first, then the stacked ones, each in the
        order of the model.

    Raises:
        PlanError: for a pattern that matches nothing, a module that is not a projection, parts that
            do not divide it, or parameters that another module has too.
    """
    entries, names = [], Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, parts in match_names(_names(model), fused, KEY).items():
        shares = _shares(model, name, parts)
        owner, _, kind = name.rpartition(".")
        found = getattr(model.get_submodule(owner), kind)
        parameters = [found] if isinstance(found, nn.Parameter) else found.parameters()
        if any(names[parameter] > 1 for parameter in parameters):
            raise PlanError(
                f"{KEY}: the parameters of {as_pattern(name)} are shared (they have several names in the model), so "
                "its parts cannot have their own; leave it out, or share none"
            )
        if isinstance(found, nn.Parameter):
            entries.append(_stack(model.get_submodule(owner), name, kind, shares))
        else:
            entries += _unfuse_module(model, name, shares)
    return entries


def fused_modules(model: nn.Module, fused: Mapping[str, Parts]) -> list[str]:
    """Return the names of the modules that `unfuse` would replace."""
    modules = {name for name, _ in model.named_modules()}
    return [name for name in match_names(_names(model), fused, KEY) if name in modules]


def split_parts(stock: Mapping[str, Tensor], fused: Iterable[FusedParameter]) -> dict[str, Tensor]:
    """Return full tensors, with every fused one replaced by its parts under their names."""
    result = dict(stock)
    for entry in fused:
        result.update(entry.split(result.pop(entry.name)))
    return result


def join_parts(ours: Mapping[str, Tensor], fused: Iterable[FusedParameter]) -> dict[str, Tensor]:
    """Return full tensors under the stock names, with the parts that are present joined."""
    result = dict(ours)
    for entry in fused:
        if entry.parts[0] in result:
            result[entry.name] = entry.join([result.pop(part) for part in entry.parts])
    return result


def _names(model: nn.Module) -> list[str]:
    modules = [name for name, _ in model.named_modules() if name]
    return modules + [name for name, parameter in model.named_parameters() if parameter.dim() > 2]


def _shares(model: nn.Module, name: str, parts: Parts) -> dict[str, int]:
    if not isinstance(parts, Mapping):
        return dict.fromkeys(parts, 1)
    config = getattr(model, "config", None)
    text = config.get_text_config() if isinstance(config, PretrainedConfig) else config
    shares = {}
    for part, share in parts.items():
        count = share if isinstance(share, int) else getattr(text, share, None)
        if not isinstance(count, int) or count < 1:
            raise PlanError(f"{KEY}: {name}.{part} = {share!r} is not a number of the model's configuration")
        shares[part] = count
    return shares


def _stack(module: nn.Module, name: str, kind: str, shares: Mapping[str, int]) -> FusedParameter:
    parameter = module.get_parameter(kind)
    dim = parameter.dim() - 2
    if len({*shares.values()}) > 1 or parameter.shape[dim] % len(shares):
        raise PlanError(f"{KEY}: {name} has {parameter.shape[dim]} rows, which are not {len(shares)} equal parts")
    values = parameter.detach().unflatten(dim, (len(shares), -1))
    module.register_parameter(kind, nn.Parameter(values, requires_grad=parameter.requires_grad))
    mix_in(module, StackedParameters, stacked_dims=((kind, dim),))
    return FusedParameter(name, (name,), dim, stacked=len(shares))


class StackedParameters:
    """A mixin for modules with stacked parameters: their forward gets these in the stock shape."""

    stacked_dims: tuple[tuple[str, int], ...]

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the stock forward on views of the parameters."""
        parameters = parameter_table(self)
        stacked = dict(parameters)
        parameters.update({kind: stacked[kind].flatten(dim, dim + 1) for kind, dim in self.stacked_dims})
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            parameters.update(stacked)


def _unfuse_module(model: nn.Module, name: str, shares: Mapping[str, int]) -> Iterable[FusedParameter]:
    module = model.get_submodule(name)
    if not isinstance(module, (nn.Linear, Conv1D)):
        raise PlanError(f"{KEY}: {name} is a {type(module).__name__}, but only Linear and Conv1D have parts")
    dim = 0 if isinstance(module, nn.Linear) else 1
    size, total = module.weight.shape[dim], sum(shares.values())
    if size % total:
        what = f"{total} equal parts do" if total == len(shares) else f"the shares {list(shares.values())} do"
        raise PlanError(f"{KEY}: {name} has {size} outputs, which {what} not divide")
    sizes = tuple(share * size // total for share in shares.values())
    unfused, entries = split_projection(module, name, dict(zip(shares, sizes, strict=True)))
    model.set_submodule(name, unfused)
    return entries


def split_projection(
    module: nn.Linear | Conv1D, name: str, widths: Mapping[str, int]
) -> tuple[UnfusedProjection, list[FusedParameter]]:
    """Return the parts of a projection with their values, and one entry per parameter.

    Args:
        module: the fused projection. It is not changed.
        name: FQN of the projection.
        widths: part -> number of its outputs.
    """
    dim, sizes = 0 if isinstance(module, nn.Linear) else 1, tuple(widths.values())
    parts = {part: _take_part(module, dim, sum(sizes[:index]), sizes[index]) for index, part in enumerate(widths)}
    entries = []
    for kind, _ in module.named_parameters():
        names = tuple(f"{name}.{part}.{kind}" for part in widths)
        along = dim if kind == "weight" else 0
        entries.append(FusedParameter(f"{name}.{kind}", names, along, sizes if len({*sizes}) > 1 else ()))
    return UnfusedProjection(parts), entries


def _take_part(module: nn.Linear | Conv1D, dim: int, start: int, width: int) -> nn.Module:
    # Each part needs its own hooks and buffers. A shallow copy would share them with other parts.
    part = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    for kind, parameter in module.named_parameters():
        values = parameter.detach().narrow(dim if kind == "weight" else 0, start, width).clone()
        part.register_parameter(kind, nn.Parameter(values, requires_grad=parameter.requires_grad))
    if isinstance(part, nn.Linear):
        part.out_features = width
    else:
        part.nf = width
    return part
