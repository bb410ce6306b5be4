"""Read tensors from a checkpoint on one process, without a process group."""

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from meshtrain.checkpoint.dcp.planner import BlockLoadPlanner
from meshtrain.checkpoint.storage.directory import USE_ANOTHER
from meshtrain.checkpoint.storage.location import LocationSystem
from meshtrain.compat.dcp import TABLE_PARTS, memory_format, reader_at
from meshtrain.errors import CheckpointError, Problem, reason_of
from meshtrain.runtime.location import Location, errors_of

METADATA_NAME = ".metadata"
# Exceptions that a broken pickle may raise: those that Python documents, and those that were
# observed.
_BROKEN_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    TypeError,
    ValueError,
)


def read_metadata(checkpoint: Location) -> Metadata:
    """Read DCP's table of where each block of each tensor is stored.

    Raises:
        CheckpointError: if the table is missing or broken, or holds objects that such a table never
            holds.
    """
    path = checkpoint / METADATA_NAME
    try:
        content = path.read_bytes()
    except errors_of(path) as error:
        raise CheckpointError(Problem(f"{path} cannot be read: {reason_of(error)}", USE_ANOTHER)) from error
    try:
        metadata = _TableUnpickler(io.BytesIO(content)).load()
    except _BROKEN_PICKLE as error:
        raise CheckpointError(Problem(f"{path} is broken ({type(error).__name__}: {error})", USE_ANOTHER)) from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise CheckpointError(Problem(f"{path} is broken (it holds no table)", USE_ANOTHER))
    return metadata


def tensor_entries(metadata: Metadata, prefix: str = "") -> dict[str, TensorStorageMetadata]:
    """Return key -> size and number format, for tensors whose key starts with `prefix`."""
    return {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


@torch.no_grad()
def read_tensors(checkpoint: Location, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    """Fill the local part of each tensor in place from the saved blocks.

    Args:
        checkpoint: its directory.
        metadata: of that checkpoint. It holds every key of `tensors`, with the same shape.
        tensors: plain or DTensor, on any mesh and device.

    Raises:
        CheckpointError: naming the file that cannot be read.
    """
    reader, planner = reader_at(checkpoint, LocationSystem()), BlockLoadPlanner()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    unreadable: tuple[type[Exception], ...] = (
        *errors_of(checkpoint),
        EOFError,
        RuntimeError,
        pickle.UnpicklingError,
    )
    by_file: dict[str, list[ReadItem]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        by_file[metadata.storage_data[item.storage_index].relative_path].append(item)
    for name, items in by_file.items():
        try:
            reader.read_data(LoadPlan(items), planner).wait()
        except unreadable as error:
            reason = reason_of(error)
            raise CheckpointError(Problem(f"{checkpoint / name} cannot be read: {reason}", USE_ANOTHER)) from error


def _member(kind: object, name: str) -> object:
    if (member := memory_format(kind, name)) is None:
        raise pickle.UnpicklingError(f"it asks for {name} of {kind}, which no checkpoint needs")
    return member


class _TableUnpickler(pickle.Unpickler):
    """Unpickler for DCP's table only, because a pickle may name any function and have it called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            # Python before 3.11.4 pickles a member of an enumeration in this form.
            return _member
        if (module, name) not in TABLE_PARTS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)
