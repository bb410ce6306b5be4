"""Allocate the pages of new memory many at once, where the system can.

New memory has no pages until it is written to. The first write to each page (4 KiB) interrupts the
process. This takes longer than copying data into the page.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

# Available since Linux 5.14. Python has no name for it. Source: madvise(2).
MADV_POPULATE_WRITE = 23


def populate_pages(tensor: Tensor) -> None:
    """Allocate the pages of a contiguous tensor on the CPU before it is written to.

    The values of the tensor do not change. This is a hint: a system that does not support it
    allocates the pages one by one, when they are written to.
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
