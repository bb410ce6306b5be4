"""Positions of elements in global tensors, and numbers that depend on nothing else."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from meshtrain.models.layout import local_indices


def global_places(
    tensor: Tensor, shape: Sequence[int] | None = None, begin: Mapping[int, int] = MappingProxyType({})
) -> tuple[Tensor, Tensor]:
    """Return where the elements that this process holds are in a global tensor.

    Args:
        tensor: plain or DTensor.
        shape: of a larger tensor that it is a part of; None: it is no part.
        begin: dimension -> index in the larger tensor at which the part begins.

    Returns:
        The flat index of the first element of each local row, (rows,) int64, and the offsets of the
        elements in a row, (columns,) int64. A row is an index of the first dimension.
    """
    flat = torch.zeros((), dtype=torch.int64)
    columns, rows = flat.view(1), flat.view(1)
    stride, sizes = 1, tensor.shape if shape is None else shape
    indices = [own + begin.get(dim, 0) for dim, own in enumerate(local_indices(tensor))]
    for dim in reversed(range(1, tensor.dim())):
        columns = (indices[dim][:, None] * stride + columns).flatten()
        stride *= sizes[dim]
    if indices:
        rows = indices[0] * stride
    return rows.to(tensor.device), columns.to(tensor.device)


def mix(places: Tensor, key: int | Tensor) -> Tensor:
    """Return numbers of 64 random bits that depend on int64 positions and a key.

    int64 arithmetic wraps around.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
        generators, 2014).
    """
    mixed = places * -7046029254386353131 + key
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        # The shift is arithmetic, so the mask removes the copies of the sign bit.
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return mixed ^ (mixed >> 31 & (1 << 33) - 1)
