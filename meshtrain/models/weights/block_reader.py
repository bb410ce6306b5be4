"""Read blocks of tensors from files into existing memory."""

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from meshtrain.errors import ModelError
from meshtrain.models.weights.safetensors_files import FileTensor

BOUNCE_BYTES = 4 * 2**20
# Number of bytes of memory that are populated at once. It needs few calls, and the pages that the
# kernel has cleared are still in the processor's cache.
FRESH_BYTES = 2 * 2**20
# Shorter runs are read together with the bytes between them, because a call for each run would cost
# more than these bytes.
SHORTEST_RUN_BYTES = 256 * 2**10
# Available since Linux 5.14. Python has no name for it. Source: madvise(2).
MADV_POPULATE_WRITE = 23


class BlockReader:
    """A reader of blocks of file tensors, with open files and one small buffer; a context manager.

    A contiguous block of the right type is read directly into host memory. All other blocks
    (columns, other types, other devices) pass through the buffer, a few rows at a time. So only the
    content of the buffer is in memory twice.
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
            ranges: one for every dimension of the tensor.
            out: of the block's shape, and of any type, strides and device.

        Raises:
            ModelError: if the file cannot be read, or has become shorter.
        """
        if out.numel() == 0:
            return
        if not ranges:
            tensor, ranges, out = _as_vector(tensor), [slice(0, 1)], out.view(1)
        # The last dimensions that are read in full, and the one before them, form a run of bytes
        # without gaps.
        dim = len(ranges) - 1
        while dim > 0 and _is_full(ranges[dim], tensor.shape[dim]):
            dim -= 1
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
        """Read full rows along `dim` into the buffer, and copy the wanted part of them to `out`."""
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
                raise ModelError(f"{tensor.path} cannot be read ({error.strerror})", "check its disk") from error
            if read == 0:
                raise ModelError(f"{tensor.path} became shorter while it was read", "do not change it, and start again")
            done += read

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]


def _runs(tensor: FileTensor, ranges: Sequence[slice], dim: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (index in the block, byte in the file) for every index of the dimensions before `dim`.

    The byte is the first of the run that belongs to the index.
    """
    strides = [math.prod(tensor.shape[inner:]) for inner in range(1, dim + 2)]
    for index in product(*(range(part.stop - part.start) for part in ranges[:dim])):
        position = [part.start + step for part, step in zip(ranges, index, strict=False)] + [ranges[dim].start]
        offset = sum(number * stride for number, stride in zip(position, strides, strict=True))
        yield index, tensor.start + offset * tensor.dtype.itemsize


def _as_vector(tensor: FileTensor) -> FileTensor:
    return FileTensor(tensor.path, tensor.name, tensor.dtype, (1,), tensor.start)


def _is_full(part: slice, length: int) -> bool:
    return part.start == 0 and part.stop == length


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def populate_pages(tensor: Tensor) -> None:
    """Allocate the pages of a contiguous tensor on the CPU before it is written to.

    New memory has no pages until it is written to. The first write to each page (4 KiB) interrupts
    the process, which takes longer than copying data into the page. Here the pages are allocated
    many at once. The values of the tensor do not change. This is a hint: a system that does not
    support it allocates the pages one by one, when they are written to.
    """
    if (advise := _advise()) is not None and tensor.nbytes:
        first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        advise(first, tensor.data_ptr() + tensor.nbytes - first, MADV_POPULATE_WRITE)


@cache
def _advise() -> Callable[..., Any] | None:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
