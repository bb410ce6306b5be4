"""Checksums of parameters, which depend on every bit, but not on the mesh."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.config.mesh import PARAMETER_AXES, axes_named
from meshtrain.models.layout import local_indices, local_tensor
from meshtrain.models.packed import BLOCK, BLOCK_BYTES, blocks_of, packed_projections, packed_width
from meshtrain.models.positions import global_places, mix
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.randomness import stream_key
from meshtrain.runtime.mesh import all_reduce_over

# Number of elements hashed at once. Each needs an index and a hash of 8 bytes in addition.
CHUNK = 2**22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(
    tensor: Tensor, fqn: str, shape: Sequence[int] | None = None, begin: Mapping[int, int] = MappingProxyType({})
) -> int:
    """Return this process's part of a parameter's checksum, signed 64 bits.

    The checksum is a sum over all elements, modulo 2**64. Each term is the bits of an element times
    an odd number, a hash of its global position. So the parts add up to the same number however the
    parameter is sharded.

    Args:
        tensor: the parameter.
        fqn: its name, or that of a larger one of which it is a part.
        shape: of the larger one, as for `global_places`.
        begin: where the part begins, as for `global_places`.
    """
    local = local_tensor(tensor.detach())
    if local.numel() == 0:
        return 0
    bits = local.contiguous().view(_INTEGERS[local.element_size()]).view(local.shape[0] if local.dim() else 1, -1)
    return _sum_of_bits(bits, *global_places(tensor.detach(), shape, begin), fqn)


def _packed_checksum(
    tensor: Tensor, fqn: str, shape: Sequence[int] | None = None, begin: Mapping[int, int] = MappingProxyType({})
) -> int:
    """Return the checksum of packed rows, which does not depend on the format that keeps them."""
    local, (rows, columns) = local_tensor(tensor.detach()), local_indices(tensor)
    if local.numel() == 0:
        return 0
    bits = blocks_of(local).flatten(1).view(torch.int16)
    # Without what fills up the blocks in some formats.
    per_block, width = BLOCK_BYTES // bits.itemsize, packed_width(BLOCK, local.dtype)
    places = int(columns[0]) // width * per_block + torch.arange(bits.shape[1], device=bits.device)
    starts = (rows + begin.get(0, 0)) * (tensor.shape[1] // width * per_block)
    return _sum_of_bits(bits, starts.to(bits.device), places, fqn)


def _sum_of_bits(bits: Tensor, rows: Tensor, row_places: Tensor, fqn: str) -> int:
    """Return the sum over bits (rows, columns), given the places of rows and inside of rows."""
    key, step = stream_key(fqn), max(1, CHUNK // bits.shape[1])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.shape[0], step):
        places = rows[start : start + step, None] + row_places
        total += (bits[start : start + step].long() * (mix(places, key) | 1)).sum()
    return int(total)


def whole_checksums(pipeline: Pipeline, *, as_stock: bool = False) -> Tensor:
    """Return the checksum of every full parameter of this process, in the order of the parameters.

    It is the same on every process that holds the parameter.

    Args:
        as_stock: whether the checksum of a part counts in that of its stock parameter.
    """
    canonical = pipeline.canonical_names()
    stock = _stock_places(pipeline) if as_stock else {}
    packed = {name for stage in pipeline.stages for name, _ in packed_projections(stage.model)}
    parts = [
        (_packed_checksum if name in packed else checksum)(parameter, *stock.get(name, (canonical[name],)))
        for name, parameter in pipeline.named_parameters()
    ]
    sums = torch.tensor(parts, dtype=torch.int64)
    for axis in PARAMETER_AXES:
        sharded = torch.tensor([is_sharded(parameter, axis) for _, parameter in pipeline.named_parameters()])
        total = all_reduce_over(torch.where(sharded, sums, 0), pipeline.mesh, [axis])
        sums = torch.where(sharded, total, sums)
    return sums


def _stock_places(pipeline: Pipeline) -> dict[str, tuple[str, Sequence[int], Mapping[int, int]]]:
    """Return name of a part -> FQN and shape of its stock parameter, and where it begins there."""
    shapes = {name: parameter.shape for name, parameter in pipeline.named_parameters()}
    return {
        part: (entry.name, shape, {entry.dim: start})
        for entry in pipeline.fused
        if not entry.stacked and entry.parts[0] in shapes
        for part, (shape, start) in entry.places([shapes[it] for it in entry.parts]).items()
    }


def is_sharded(parameter: Tensor, axis: str) -> bool:
    """Return whether a parameter is sharded over an axis of the mesh."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    placements = zip(names, parameter.placements, strict=True)
    return any(axis in axes_named(name) and not placement.is_replicate() for name, placement in placements)
