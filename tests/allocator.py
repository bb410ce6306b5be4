"""The C library's allocator, for measurements of what a process needs."""

import ctypes

M_MMAP_THRESHOLD = -3


def return_freed_memory() -> None:
    """Return freed memory to the system at once, in this process.

    glibc keeps freed memory up to a growing threshold. So the memory of a process would be what its
    allocator holds, which may be much more than what it needs.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
