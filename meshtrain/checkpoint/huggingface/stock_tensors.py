"""The tensors of the stock model, and the parts in which some of them are kept."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshtrain.models.fused import FusedParameter

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StockTensor:
    """A tensor of the stock model.

    Attributes:
        name: FQN of the tensor.
        parts: our names of its parts, in order.
        dim: dimension along which the parts are joined.
        sizes: of the parts along `dim`. Empty: there is one part.
        shape: of the full tensor.
        kept_as: the shape in which we keep it, where that is another one: a stack of parts.
    """

    name: str
    parts: tuple[str, ...]
    dim: int
    sizes: tuple[int, ...]
    shape: Shape
    kept_as: Shape = ()

    def views(self, full: Tensor) -> dict[str, Tensor]:
        """Return our name -> view of the part in the full tensor."""
        pieces = (
            torch.split(full, list(self.sizes), self.dim) if self.sizes else [full.view(self.kept_as or self.shape)]
        )
        return dict(zip(self.parts, pieces, strict=True))


def stock_tensors(
    shapes: Mapping[str, Shape], fused: Iterable[FusedParameter], *, left_out: Collection[str] = ()
) -> dict[str, StockTensor]:
    """Return the tensors of the stock model by name, in an order that does not depend on the mesh.

    Args:
        shapes: our name -> shape of the full tensor. It holds all parts of a fused parameter, or
            none.
        fused: stock parameters that are kept in parts.
        left_out: our names of tensors that the stock model does not have: tied heads.
    """
    entries = {entry.name: entry for entry in fused if entry.parts[0] in shapes}
    is_split = {part for entry in entries.values() for part in entry.parts}
    names = [*entries, *(name for name in shapes if name not in is_split and name not in left_out)]
    return {
        name: _joined(entries[name], shapes) if name in entries else StockTensor(name, (name,), 0, (), shapes[name])
        for name in sorted(names, key=_natural)
    }


def _joined(entry: FusedParameter, shapes: Mapping[str, Shape]) -> StockTensor:
    kept, dim = shapes[entry.parts[0]], entry.dim
    if entry.stacked:
        shape = (*kept[:dim], kept[dim] * kept[dim + 1], *kept[dim + 2 :])
        return StockTensor(entry.name, entry.parts, dim, (), shape, kept)
    sizes = tuple(shapes[part][dim] for part in entry.parts)
    return StockTensor(entry.name, entry.parts, dim, sizes, (*kept[:dim], sum(sizes), *kept[dim + 1 :]))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(not word.isdigit(), int(word) if word.isdigit() else 0, word) for word in re.split(r"\.", name)]
