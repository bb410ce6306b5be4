"""torch's distributed checkpoints: the parts of their pickled table, and a reader."""

from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
_METADATA = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
TABLE_PARTS = frozenset(
    [
        *(("torch", dtype) for dtype in _DTYPES),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA),
    ]
)
"""Module and name of everything that the pickled table of a checkpoint may contain.

Why: a pickle may name any function, and cause a call. Three of these names are private.
Holds: torch 2.11 to 2.13.
"""


def memory_format(kind: object, name: str) -> object | None:
    """Return the member of torch's enumeration of memory formats; None if `kind` is something else.

    Why: Python before 3.11.4 pickles such a member as a call of `getattr`, and the enumeration is
    private.
    Holds: torch 2.11 to 2.13.
    """
    return _MEM_FORMAT_ENCODING[name] if kind is _MEM_FORMAT_ENCODING else None


def reader_at(path: Any, system: Any) -> FileSystemReader:
    """Return torch's reader for a directory of another file system.

    Why: its constructor takes a path of this machine's file system, or one of fsspec.
    Holds: torch 2.11 to 2.13.

    Args:
        path: of the directory.
        system: implements `torch.distributed.checkpoint.filesystem.FileSystemBase` for such paths.
    """
    reader = FileSystemReader("")
    reader.fs, reader.path = system, path
    return reader
