"""numpy: the mapping under a memory-mapped array."""

import mmap

import numpy as np


def read_at_random(array: np.memmap) -> None:
    """Switch readahead off for a memory-mapped array that is read at random offsets.

    It has no effect where the system does not support it.

    Why: only the mapping has this setting, and numpy keeps it under a private name.
    Holds: numpy 1.26 to 2.4.
    """
    if hasattr(mmap, "MADV_RANDOM"):
        array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
