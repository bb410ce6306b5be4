"""Blocks of tensors in files, read into memory that is there already."""

import math
import os
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from meshtrain.errors import ModelError
from meshtrain.models.weights.safetensors_files import FileTensor
from meshtrain.runtime.fresh_memory import populate_pages

BOUNCE_BYTES = 4 * 2**20
# So much memory is brought at once: few calls, and what the kernel has cleared is still in the cache of the processor.
FRESH_BYTES = 2 * 2**20
# Shorter runs are read together with what lies between them: a call for each would cost more than the bytes.
SHORTEST_RUN_BYTES = 256 * 2**10


class BlockReader:
    """Copies blocks of file tensors; holds the files open, and one small buffer. Use it as a context.

    What lies in one piece, in the right type and for host memory, goes there directly. Everything else (columns, other
    types, other devices) passes through the buffer, a few rows at a time, so that no more than it is held twice.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._bounce = torch.empty(0, dtype=torch.uint8)
        self._pinned = pinned
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, tensor: FileTensor, ranges: Sequence[slice], out: Tensor) -> None:
        """Fill `out` with a block.

        Args:
            tensor: in a file.
            ranges: of every dimension of the tensor.
            out: of the block's shape, any type, strides and device.
        """
        if out.numel() == 0:
            return
        if not ranges:
            tensor, ranges, out = _as_vector(tensor), [slice(0, 1)], out.view(1)
        # The last dimensions that are taken whole, and one before them, make up a run of bytes without gaps.
        whole = len(ranges)
        while whole > 1 and _is_whole(ranges[whole - 1], tensor.shape[whole - 1]):
            whole -= 1
        dim = whole - 1
        run_bytes = out.dtype.itemsize * math.prod(out.shape[dim:])
        fits = out.device.type == "cpu" and out.dtype == tensor.dtype
        if fits and out[(0,) * dim].is_contiguous() and (dim == 0 or run_bytes >= SHORTEST_RUN_BYTES):
            for index, start in _runs(tensor, ranges, dim):
                self._read_fresh(tensor, start, _bytes_of(out[index]))
        else:
            self._read_rows(tensor, ranges, max(0, dim - 1), out)

    def _read_fresh(self, tensor: FileTensor, start: int, target: Tensor) -> None:
        for first in range(0, len(target), FRESH_BYTES):
            piece = target[first : first + FRESH_BYTES]
            populate_pages(piece)
            self._read_bytes(tensor, start + first, piece)

    def _read_rows(self, tensor: FileTensor, ranges: Sequence[slice], dim: int, out: Tensor) -> None:
        """Read whole rows, counted along `dim`, into the buffer, and copy from there what is wanted of them."""
        row_shape = tensor.shape[dim + 1 :]
        row_bytes = math.prod(row_shape) * tensor.dtype.itemsize
        if row_bytes > BOUNCE_BYTES and len(row_shape) > 0:
            for position, row in enumerate(range(ranges[dim].start, ranges[dim].stop)):
                one = [*ranges[:dim], slice(row, row + 1), *ranges[dim + 1 :]]
                self._read_rows(tensor, one, dim + 1, out.narrow(dim, position, 1))
            return
        at_once = max(1, BOUNCE_BYTES // max(1, row_bytes))
        wanted = (slice(None), *ranges[dim + 1 :])
        for index, start in _runs(tensor, ranges, dim):
            target = out[index]
            for first in range(0, target.shape[0], at_once):
                count = min(at_once, target.shape[0] - first)
                buffer = self._buffer(count * row_bytes)
                self._read_bytes(tensor, start + first * row_bytes, buffer)
                rows = buffer.view(tensor.dtype).view(count, *row_shape)
                target[first : first + count].copy_(rows[wanted])

    def _buffer(self, size: int) -> Tensor:
        if self._bounce.numel() < size:
            self._bounce = torch.empty(max(size, BOUNCE_BYTES), dtype=torch.uint8, pin_memory=self._pinned)
        return self._bounce[:size]

    def _read_bytes(self, tensor: FileTensor, start: int, target: Tensor) -> None:
        memory, done = memoryview(target.numpy()), 0  # type: ignore[arg-type]
        while done < len(memory):
            try:
                read = os.preadv(self._descriptor(tensor.path), [memory[done:]], start + done)
            except OSError as error:
                raise ModelError(
                    f"{tensor.path} cannot be read ({error.strerror}); see whether its disk is well"
                ) from error
            if read == 0:
                raise ModelError(f"{tensor.path} became shorter while it was read; leave it alone, and start again")
            done += read

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]


def _runs(tensor: FileTensor, ranges: Sequence[slice], dim: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield, for every index into the dimensions before `dim`, that index into the block and where it begins."""
    strides = [math.prod(tensor.shape[position + 1 :]) for position in range(dim + 1)]
    for index in product(*(range(part.stop - part.start) for part in ranges[:dim])):
        places = [part.start + step for part, step in zip(ranges, index, strict=False)] + [ranges[dim].start]
        offset = sum(place * stride for place, stride in zip(places, strides, strict=True))
        yield index, tensor.start + offset * tensor.dtype.itemsize


def _as_vector(tensor: FileTensor) -> FileTensor:
    return FileTensor(tensor.path, tensor.name, tensor.dtype, (1,), tensor.start)


def _is_whole(part: slice, length: int) -> bool:
    return part.start == 0 and part.stop == length


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
