"""Tensors without values that record the operations on tensors in files that give their values.

The layout of weights on the hub may differ from that of the modules (experts one by one, fused
projections). transformers converts it by joining, stacking, cutting and transposing full tensors.
Here the same code runs on tensors without values, `LazyTensor`, which record these operations as a
tree. Any block of the result can be read separately, so a process reads only the values of its
shards.
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

        Every lazy tensor can be contiguous, because positions are recorded, not bytes.
        """
        tensor = tensor_without_memory(cls, shape, dtype)
        tensor.node = node
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operation that moves values, and return its result.

        Raises:
            NotRecordedError: for any other operation.
        """
        record = _OPERATIONS.get(func.overloadpacket)
        if record is None:
            raise NotRecordedError(str(func))
        return record(*args, **(kwargs or {}))

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


def _record_cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    dim %= tensors[0].dim()
    shape = list(tensors[0].shape)
    others = [tensor.shape[:dim] + tensor.shape[dim + 1 :] for tensor in tensors]
    if any(other != others[0] for other in others):
        raise ValueError(f"shapes {', '.join(str(tuple(shape)) for shape in dict.fromkeys(t.shape for t in tensors))}")
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return LazyTensor(Joined(list(tensors), dim), shape, tensors[0].dtype)


def _record_stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return _record_cat([_record_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _record_slice(
    tensor: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyTensor:
    if step != 1:
        raise NotRecordedError("a slice with steps")
    dim %= tensor.dim()
    part = slice(*slice(start, end).indices(tensor.shape[dim])[:2])
    shape = [*tensor.shape[:dim], max(0, part.stop - part.start), *tensor.shape[dim + 1 :]]
    return LazyTensor(Cut(tensor, dim, part.start), shape, tensor.dtype)


def _record_select(tensor: LazyTensor, dim: int, index: int) -> LazyTensor:
    dim %= tensor.dim()
    index %= tensor.shape[dim]
    return _record_squeeze(_record_slice(tensor, dim, index, index + 1), dim)


def _record_unbind(tensor: LazyTensor, dim: int = 0) -> list[LazyTensor]:
    return [_record_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _record_split(tensor: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> list[LazyTensor]:
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    ends = torch.tensor(list(sizes)).cumsum(0).tolist()
    return [_record_slice(tensor, dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _record_transpose(tensor: LazyTensor, first: int, second: int) -> LazyTensor:
    order = list(range(tensor.dim()))
    order[first], order[second] = order[second], order[first]
    return _record_permute(tensor, order)


def _record_permute(tensor: LazyTensor, order: Sequence[int]) -> LazyTensor:
    order = [dim % tensor.dim() for dim in order]
    return LazyTensor(Permuted(tensor, order), [tensor.shape[dim] for dim in order], tensor.dtype)


def _record_view(tensor: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    known = -math.prod(shape)
    lengths = [tensor.numel() // known if length == -1 else length for length in shape]
    return LazyTensor(Reshaped(tensor, lengths), lengths, tensor.dtype)


def _record_unsqueeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    dim %= tensor.dim() + 1
    return LazyTensor(Unsqueezed(tensor, dim), [*tensor.shape[:dim], 1, *tensor.shape[dim:]], tensor.dtype)


def _record_squeeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    dim %= tensor.dim()
    if tensor.shape[dim] != 1:
        return tensor
    return LazyTensor(Squeezed(tensor, dim), [*tensor.shape[:dim], *tensor.shape[dim + 1 :]], tensor.dtype)


def _record_identity(tensor: LazyTensor, *_: object, **options: object) -> LazyTensor:
    if options.get("dtype", tensor.dtype) not in (None, tensor.dtype):
        raise NotRecordedError("another type")
    return tensor


_aten = torch.ops.aten
_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _aten.cat: _record_cat,
    _aten.stack: _record_stack,
    _aten.slice: _record_slice,
    _aten.select: _record_select,
    _aten.unbind: _record_unbind,
    _aten.split: _record_split,
    _aten.split_with_sizes: _record_split,
    _aten.transpose: _record_transpose,
    _aten.t: lambda tensor: _record_transpose(tensor, 0, -1),
    _aten.permute: _record_permute,
    **dict.fromkeys(VIEWS, _record_view),
    _aten.unsqueeze: _record_unsqueeze,
    _aten.squeeze: _record_squeeze,
    _aten.clone: _record_identity,
    _aten.detach: _record_identity,
    _aten.alias: _record_identity,
    **dict.fromkeys(CASTS, _record_identity),
}
