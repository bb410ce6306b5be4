"""What the C library does with host memory that a process frees."""

import ctypes
import os
import platform

# Parameters of `mallopt`, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> None:
    """Let the C library keep memory that is freed, for the next tensors of this process.

    By default glibc gives the memory of large tensors back to the operating system, which must
    clear the same pages again in the next step. On a CPU this takes 1 to 5% of a step. A process
    then holds its peak until it ends, and that may be higher if tensors grow, because freed memory
    lies in pieces. Settings of the user in environment variables are respected. Other C libraries,
    and a glibc that refuses the size, stay as they are.
    """
    is_set = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] != "glibc" or is_set or any(name in os.environ for name in _VARIABLES):
        return
    mallopt = ctypes.CDLL(None).mallopt
    # In this order: the second one alone would make all large tensors be given back.
    if mallopt(_MMAP_THRESHOLD, _LARGEST):
        mallopt(_TRIM_THRESHOLD, _LARGEST)
