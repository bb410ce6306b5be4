"""Find the part of a global tensor that this process holds."""

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshtrain.compat.dtensor import is_split_late, local_in_graph, split, split_dim


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this process holds; a plain tensor is returned itself."""
    return local_in_graph(tensor) if isinstance(tensor, DTensor) else tensor


def reduced_shape(shape: Sequence[int], dim: int) -> list[int]:
    """Return a shape with size 1 in a dimension, which may be negative."""
    reduced = list(shape)
    reduced[dim] = 1
    return reduced


def blocks_shape(shape: Sequence[int], size: int) -> list[int]:
    """Return a shape with the number of blocks of some size in place of its last dimension."""
    return [*shape[:-1], shape[-1] // size]


def local_indices(tensor: Tensor) -> list[Tensor]:
    """Return, for each tensor dimension, the global indices held by this process, in local order.

    This is correct for every mixture of Shard and the _StridedShard that FSDP2 makes of tensor
    parallel parameters. Each placement splits the result of the placements before it, so one vector
    per dimension describes the local block.
    """
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "this process is not on the mesh of its own tensor"
        return _split_indices(tensor.shape, tensor.device_mesh, tensor.placements, coordinate)
    return [torch.arange(size) for size in tensor.shape]


def local_ranges(tensor: Tensor) -> list[slice]:
    """Return `local_indices` as ranges.

    Every split is contiguous, so a process holds one block.
    """
    return _ranges(local_indices(tensor))


@functools.lru_cache(maxsize=4096)
def ranges_at(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> tuple[slice, ...]:
    """Return the block of a tensor that any process holds, as a range in every dimension.

    Unlike `local_ranges`, it computes without tensors, also in a simulation.

    Args:
        shape: of the global tensor.
        mesh: of the tensor. Its sizes count, and not its processes.
        placements: of the tensor.
        coordinate: of the process on the mesh.
    """
    ranges = [range(size) for size in shape]
    for axis, dim in _splits(shape, placements):
        size = -(-len(ranges[dim]) // mesh.size(axis))
        ranges[dim] = ranges[dim][size * coordinate[axis] : size * (coordinate[axis] + 1)]
    return tuple(slice(own.start, own.stop) if own else slice(0, 0) for own in ranges)


def holders_of(tensor: DTensor) -> list[tuple[int, list[slice]]]:
    """Return the ranks that hold the blocks of a tensor, each with a range in every dimension.

    Every block appears once, with the first rank of the mesh that holds it. Empty blocks are left
    out.
    """
    return _holders(tensor.shape, tensor.device_mesh, tensor.placements)


@functools.lru_cache(maxsize=256)
def _holders(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[tuple[int, list[slice]]]:
    holders: dict[tuple[tuple[int, int], ...], tuple[int, list[slice]]] = {}
    for coordinate in itertools.product(*map(range, mesh.mesh.shape)):
        ranges = _ranges(_split_indices(shape, mesh, placements, coordinate))
        if all(part.stop > part.start for part in ranges):
            key = tuple((part.start, part.stop) for part in ranges)
            holders.setdefault(key, (int(mesh.mesh[coordinate]), ranges))
    return list(holders.values())


def _ranges(indices: Sequence[Tensor]) -> list[slice]:
    return [slice(int(index[0]), int(index[-1]) + 1) if len(index) else slice(0, 0) for index in indices]


def _split_indices(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], coordinate: Sequence[int]
) -> list[Tensor]:
    indices = [torch.arange(size) for size in shape]
    for axis, dim in _splits(shape, placements):
        indices[dim] = split(indices[dim], mesh.size(axis))[coordinate[axis]]
    return indices


def _splits(shape: Sequence[int], placements: Sequence[Placement]) -> Iterator[tuple[int, int]]:
    """Yield each axis of a mesh that splits a tensor, and the dimension, in their order."""
    # _StridedShard means that FSDP2 split the shard of tensor parallelism, although its mesh axis
    # comes first. Splitting in that order is exact. torch's own arithmetic with split_factor is
    # wrong by some rows for some uneven sizes: 13 rows over dp_shard = 3 x tp = 2, or GPT-2's
    # vocabulary of 50257 over dp_shard = 4 x tp = 2.
    for axis, placement in sorted(enumerate(placements), key=lambda item: is_split_late(item[1])):
        if placement.is_replicate():
            continue
        dim = split_dim(placement)
        assert dim is not None, f"a parameter cannot be {placement}"
        yield axis, dim % len(shape)
