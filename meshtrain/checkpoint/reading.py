"""Read tensors out of a checkpoint: on one process, without a process group."""

import pickle
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from meshtrain.checkpoint.planner import BlockLoadPlanner
from meshtrain.errors import CheckpointError

METADATA_NAME = ".metadata"
# What a broken pickle may raise, as far as Python's documentation says, and what it was seen to raise.
_BROKEN_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)


def read_metadata(checkpoint: Path) -> Metadata:
    """Read DCP's table of which block of which tensor is where.

    Raises:
        CheckpointError: if it is missing or broken.
    """
    path = checkpoint / METADATA_NAME
    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; use another checkpoint") from error
    except _BROKEN_PICKLE as error:
        raise CheckpointError(f"{path} is broken ({type(error).__name__}: {error}); use another checkpoint") from error
    return metadata


def tensor_entries(metadata: Metadata, prefix: str = "") -> dict[str, TensorStorageMetadata]:
    """Return key -> size and number format of the tensors whose key starts with `prefix`."""
    return {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def find_damage(checkpoint: Path, metadata: Metadata) -> list[str]:
    """Name every file that DCP planned and that is not there, or not of its length."""
    lengths: dict[str, int] = defaultdict(int)
    for entry in metadata.storage_data.values():
        lengths[entry.relative_path] = max(lengths[entry.relative_path], entry.offset + entry.length)
    problems = []
    for name, length in sorted(lengths.items()):
        path = checkpoint / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != length:
            problems.append(f"{path} has {path.stat().st_size} bytes and should have {length}")
    return problems


@torch.no_grad()
def read_tensors(checkpoint: Path, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    """Fill the local part of each tensor in place from the blocks that were saved.

    Args:
        checkpoint: the directory.
        metadata: of that checkpoint; it holds every key of `tensors`, with the same shape.
        tensors: plain or DTensor, on any mesh and device.

    Raises:
        CheckpointError: naming the file that cannot be read.
    """
    reader, planner = FileSystemReader(checkpoint), BlockLoadPlanner()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    by_file: dict[str, list[ReadItem]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        by_file[metadata.storage_data[item.storage_index].relative_path].append(item)
    for name, items in by_file.items():
        try:
            reader.read_data(LoadPlan(items), planner).wait()
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{checkpoint / name} cannot be read: {reason}; use another checkpoint") from error
