"""numpy: the mapping under a memory-mapped array."""

import mmap

import numpy as np


def read_at_random(array: np.memmap) -> None:
    """Switch readahead off for a memory-mapped array, where the system can: it will be read at random offsets.

    Why: numpy keeps the mapping, which alone can be told, under a private name.
    Holds: numpy 1.26 to 2.4.
    """
    if hasattr(mmap, "MADV_RANDOM"):
        array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
