"""Tensors without values that record where their values come from: moves over tensors in files.

The layout of weights on the hub may differ from that of the modules (experts one by one, fused
projections). transformers converts it by joining, stacking, cutting and transposing full tensors.
Here the same code runs on tensors without values, `LazyTensor`, which record these moves as a tree.
Any block of the result can be read separately, so a process reads only the values of its shards.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.compat.autograd import tensor_without_memory
from meshtrain.compat.operators import CASTS, VIEWS
from meshtrain.models.weights.block_reader import BlockReader
from meshtrain.models.weights.operations import (
    Cut,
    InFile,
    Joined,
    Node,
    Permuted,
    Ranges,
    Reshaped,
    Squeezed,
    Unsqueezed,
)
from meshtrain.models.weights.safetensors_files import FileTensor


class NotRecordedError(Exception):
    """An operation does more than move values, so no block of its result can be read separately."""


class LazyTensor(Tensor):
    """A tensor without values that can read them from files."""

    node: Node

    @staticmethod
    def __new__(cls, node: Node, shape: Sequence[int], dtype: torch.dtype) -> "LazyTensor":
        """Create a tensor that appears as a contiguous tensor on the CPU.

        Every lazy tensor can be contiguous, because moves are recorded by position, not by byte.
        """
        origin = tensor_without_memory(cls, shape, dtype)
        origin.node = node
        return origin

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operation that moves values, and return its result.

        Raises:
            NotRecordedError: for any other operation.
        """
        move = _MOVES.get(func.overloadpacket)
        if move is None:
            raise NotRecordedError(str(func))
        return move(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape and the node, because there are no values to print."""
        return f"LazyTensor({tuple(self.shape)}, {self.node})"

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        """Fill `out`, of any type, strides and device, with a block of the values."""
        if out.numel():
            self.node.read(list(ranges), out, reader)


def lazy_tensor_in_file(tensor: FileTensor) -> LazyTensor:
    """Return the lazy tensor of a tensor that is stored in a file."""
    return LazyTensor(InFile(tensor), tensor.shape, tensor.dtype)


def _move_cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    dim %= tensors[0].dim()
    shape = list(tensors[0].shape)
    others = [tensor.shape[:dim] + tensor.shape[dim + 1 :] for tensor in tensors]
    if any(other != others[0] for other in others):
        raise ValueError(f"shapes {', '.join(str(tuple(shape)) for shape in dict.fromkeys(t.shape for t in tensors))}")
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return LazyTensor(Joined(list(tensors), dim), shape, tensors[0].dtype)


def _move_stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return _move_cat([_move_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _move_slice(
    origin: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyTensor:
    if step != 1:
        raise NotRecordedError("a slice with steps")
    dim %= origin.dim()
    part = slice(*slice(start, end).indices(origin.shape[dim])[:2])
    shape = [*origin.shape[:dim], max(0, part.stop - part.start), *origin.shape[dim + 1 :]]
    return LazyTensor(Cut(origin, dim, part.start), shape, origin.dtype)


def _move_select(origin: LazyTensor, dim: int, index: int) -> LazyTensor:
    dim %= origin.dim()
    index %= origin.shape[dim]
    return _move_squeeze(_move_slice(origin, dim, index, index + 1), dim)


def _move_unbind(origin: LazyTensor, dim: int = 0) -> list[LazyTensor]:
    return [_move_select(origin, dim, index) for index in range(origin.shape[dim])]


def _move_split(origin: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> list[LazyTensor]:
    length = origin.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    ends = torch.tensor(list(sizes)).cumsum(0).tolist()
    return [_move_slice(origin, dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _move_transpose(origin: LazyTensor, first: int, second: int) -> LazyTensor:
    order = list(range(origin.dim()))
    order[first], order[second] = order[second], order[first]
    return _move_permute(origin, order)


def _move_permute(origin: LazyTensor, order: Sequence[int]) -> LazyTensor:
    order = [dim % origin.dim() for dim in order]
    return LazyTensor(Permuted(origin, order), [origin.shape[dim] for dim in order], origin.dtype)


def _move_view(origin: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    known = -math.prod(shape)
    lengths = [origin.numel() // known if length == -1 else length for length in shape]
    return LazyTensor(Reshaped(origin, lengths), lengths, origin.dtype)


def _move_unsqueeze(origin: LazyTensor, dim: int) -> LazyTensor:
    dim %= origin.dim() + 1
    return LazyTensor(Unsqueezed(origin, dim), [*origin.shape[:dim], 1, *origin.shape[dim:]], origin.dtype)


def _move_squeeze(origin: LazyTensor, dim: int) -> LazyTensor:
    dim %= origin.dim()
    if origin.shape[dim] != 1:
        return origin
    return LazyTensor(Squeezed(origin, dim), [*origin.shape[:dim], *origin.shape[dim + 1 :]], origin.dtype)


def _stay(origin: LazyTensor, *_: object, **options: object) -> LazyTensor:
    if options.get("dtype", origin.dtype) not in (None, origin.dtype):
        raise NotRecordedError("another type")
    return origin


_aten = torch.ops.aten
_MOVES: dict[Any, Callable[..., Any]] = {
    _aten.cat: _move_cat,
    _aten.stack: _move_stack,
    _aten.slice: _move_slice,
    _aten.select: _move_select,
    _aten.unbind: _move_unbind,
    _aten.split: _move_split,
    _aten.split_with_sizes: _move_split,
    _aten.transpose: _move_transpose,
    _aten.t: lambda origin: _move_transpose(origin, 0, -1),
    _aten.permute: _move_permute,
    **dict.fromkeys(VIEWS, _move_view),
    _aten.unsqueeze: _move_unsqueeze,
    _aten.squeeze: _move_squeeze,
    _aten.clone: _stay,
    _aten.detach: _stay,
    _aten.alias: _stay,
    **dict.fromkeys(CASTS, _stay),
}
