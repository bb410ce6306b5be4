"""The C library's allocator, for measurements of what a process needs."""

import ctypes

M_MMAP_THRESHOLD = -3


def return_freed_memory() -> None:
    """Return memory that is freed from now on to the system at once, in this process.

    The processes of meshtrain keep freed memory on a CPU, and glibc alone does so up to a growing
    threshold. So a process may hold much more memory than it needs. Pieces of less than 64 KiB
    stay.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
