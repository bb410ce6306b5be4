"""Wait until files are on the disk."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Wait until a directory and everything in it are on the disk."""
    for path in [*directory.rglob("*"), directory]:
        flush(path)
