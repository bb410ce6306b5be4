"""Pages of fresh memory: asked for many at once, where the system can.

Memory that nobody has written to is not there yet. The first write to each of its pages (4 KiB) interrupts the
process, and that takes longer than to copy something there.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

# Of Linux 5.14; Python has no name for it. Source: madvise(2).
MADV_POPULATE_WRITE = 23


def populate_pages(tensor: Tensor) -> None:
    """Have the memory of a contiguous tensor on the CPU there before it is written to; its values stay.

    It is a hint: a system that does not know it brings the pages one by one, when they are written to.
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
