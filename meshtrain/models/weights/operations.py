"""Operations that move values of tensors in files: a tree whose nodes can read any block."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshtrain.models.weights.block_reader import BlockReader
from meshtrain.models.weights.safetensors_files import FileTensor

# A reshape needs a temporary copy. A block of more bytes is reshaped row by row.
RESHAPED_BYTES = 64 * 2**20
# Up to this number of rows are read one by one. For more rows, everything between the first and the
# last is read together.
FEW_ROWS = 64
Ranges = Sequence[slice]


class Node(Protocol):
    """Anything from which a block can be read."""

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        """Fill `out`, of any type and strides, with the block."""


class ValueSource(Protocol):
    """A tensor to which an operation is applied."""

    @property
    def shape(self) -> Sequence[int]:
        """Return the lengths of the dimensions."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the values."""

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        """Fill `out`, of any type and strides, with the block."""


class InFile:
    """A tensor as it is stored in a file."""

    def __init__(self, tensor: FileTensor) -> None:
        self._tensor = tensor

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        reader.read(self._tensor, ranges, out)


class Joined:
    """Several parts, joined along a dimension."""

    def __init__(self, parts: Sequence[ValueSource], dim: int) -> None:
        self._parts, self._dim = parts, dim

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        dim, start = self._dim, 0
        wanted = ranges[dim]
        for part in self._parts:
            stop = start + part.shape[dim]
            low, high = max(start, wanted.start), min(stop, wanted.stop)
            if low < high:
                inner = [*ranges[:dim], slice(low - start, high - start), *ranges[dim + 1 :]]
                part.read(inner, out.narrow(dim, low - wanted.start, high - low), reader)
            start = stop


class Cut:
    """A range of one dimension."""

    def __init__(self, source: ValueSource, dim: int, start: int) -> None:
        self._source, self._dim, self._start = source, dim, start

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        part = ranges[self._dim]
        moved = slice(part.start + self._start, part.stop + self._start)
        self._source.read([*ranges[: self._dim], moved, *ranges[self._dim + 1 :]], out, reader)


class Permuted:
    """A tensor with its dimensions in another order."""

    def __init__(self, source: ValueSource, order: Sequence[int]) -> None:
        self._source, self._order = source, order

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        back = [self._order.index(dim) for dim in range(len(self._order))]
        self._source.read([ranges[dim] for dim in back], out.permute(back), reader)


class Reshaped:
    """The same values in the same order with another shape.

    Dimensions that are equal at the beginning and at the end of both shapes keep their ranges.
    """

    def __init__(self, source: ValueSource, shape: Sequence[int]) -> None:
        self._source, self._new, self._old = source, tuple(shape), tuple(source.shape)
        least = min(len(self._new), len(self._old))
        self._before = next((i for i in range(least) if self._new[i] != self._old[i]), least)
        rest = least - self._before
        self._after = next((i for i in range(rest) if self._new[-1 - i] != self._old[-1 - i]), rest)

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        before, last = self._before, len(self._new) - self._after
        if before and out.shape[0] > 1 and out.nbytes > RESHAPED_BYTES:
            self._read_one_by_one(0, ranges, out, reader)
        elif last - before > 1 and 1 < out.shape[before] <= FEW_ROWS and not self._is_full(ranges[before + 1 : last]):
            self._read_one_by_one(before, ranges, out, reader)
        else:
            self._read_together(ranges, out, reader)

    def _is_full(self, ranges: Ranges) -> bool:
        lengths = self._new[self._before + 1 : len(self._new) - self._after]
        return all(part == slice(0, length) for part, length in zip(ranges, lengths, strict=True))

    def _read_one_by_one(self, dim: int, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        for offset, index in enumerate(range(ranges[dim].start, ranges[dim].stop)):
            one = [*ranges[:dim], slice(index, index + 1), *ranges[dim + 1 :]]
            self.read(one, out.narrow(dim, offset, 1), reader)

    def _read_together(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        before, last_new, last_old = self._before, len(self._new) - self._after, len(self._old) - self._after
        new, old = self._new[before:last_new], self._old[before:last_old]
        positions = _flat_positions(new, ranges[before:last_new])
        # Of the old dimensions in between, full rows of the first one are read.
        row = math.prod(old[1:])
        first, stop = int(positions[0]) // row, int(positions[-1]) // row + 1
        inner = [slice(first, stop), *(slice(0, length) for length in old[1:])] if old else []
        held = torch.empty(
            [*out.shape[:before], *(part.stop - part.start for part in inner), *out.shape[last_new:]],
            dtype=self._source.dtype,
        )
        self._source.read([*ranges[:before], *inner, *ranges[last_new:]], held, reader)
        flat = held.reshape(*out.shape[:before], -1, *out.shape[last_new:])
        positions = positions - first * row
        if len(positions) == flat.shape[before]:
            out.copy_(flat.view(out.shape))
        else:
            out.copy_(flat.index_select(before, positions).view(out.shape))


def _flat_positions(lengths: Sequence[int], ranges: Ranges) -> Tensor:
    """Return the row-major positions of a block, ascending."""
    positions = torch.zeros(1, dtype=torch.int64)
    for length, part in zip(lengths, ranges, strict=True):
        positions = (positions[:, None] * length + torch.arange(part.start, part.stop)).flatten()
    return positions


class Unsqueezed:
    """A tensor with one more dimension, of length 1."""

    def __init__(self, source: ValueSource, dim: int) -> None:
        self._source, self._dim = source, dim

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        self._source.read([*ranges[: self._dim], *ranges[self._dim + 1 :]], out.squeeze(self._dim), reader)


class Squeezed:
    """A tensor without one of its dimensions, which had length 1."""

    def __init__(self, source: ValueSource, dim: int) -> None:
        self._source, self._dim = source, dim

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        inner = [*ranges[: self._dim], slice(0, 1), *ranges[self._dim :]]
        self._source.read(inner, out.unsqueeze(self._dim), reader)
