"""The record of what CUDA's allocator does."""

from pathlib import Path

import torch

MOST_EVENTS = 1_000_000
"""Number of allocations that the record keeps; then it forgets the oldest."""


def record_memory() -> None:
    """Begin to record every allocation on the GPU, with the Python functions that asked for it.

    Why: torch documents the record of its allocator, but under private names.
    Holds: torch 2.11 to 2.13.
    """
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")


def write_memory_record(path: Path) -> None:
    """Write the record to a file that https://docs.pytorch.org/memory_viz reads.

    Why: as for `record_memory`.
    Holds: torch 2.11 to 2.13.

    Raises:
        OSError: if the file cannot be written.
    """
    torch.cuda.memory._dump_snapshot(str(path))


def end_memory_record() -> None:
    """Stop recording, and forget the record.

    Why: as for `record_memory`.
    Holds: torch 2.11 to 2.13.
    """
    torch.cuda.memory._record_memory_history(enabled=None)
