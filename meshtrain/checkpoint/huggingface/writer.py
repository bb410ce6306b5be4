"""Write the safetensors files of a folder tensor by tensor, with one tensor in memory at a time.

The library writes a file from all of its tensors at once. The format allows more: its header gives
the position of every tensor in the file, and shapes and number formats are known in advance.
Format: github.com/huggingface/safetensors, README.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from meshtrain.checkpoint.huggingface.layout import FilePlan, HubLayout
from meshtrain.errors import Problem
from meshtrain.models.weights.safetensors_files import INDEX_NAME, FileTensor

COPIED_BYTES = 16 * 2**20
"""A tensor of another folder is copied in pieces of this size."""

# In the order in which the library sorts them: large formats first, so that every tensor is
# aligned.
_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}


def write_index(folder: Path, layout: HubLayout, plan: FilePlan) -> None:
    """Write which tensor is in which file, if there are several files."""
    if len(plan.files) < 2:
        return
    counted = {} if layout.num_parameters is None else {"total_parameters": layout.num_parameters}
    index = {"metadata": {**counted, "total_size": plan.total_bytes}, "weight_map": plan.file_of}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def find_lost_files(folder: Path, layout: HubLayout, plan: FilePlan) -> list[Problem]:
    """Return a problem for each file that this process does not see as other processes wrote it."""
    problems = []
    for name, members in plan.files.items():
        tensors = {hub: layout.tensors[hub] for hub in members}
        size = len(_header(tensors)[0]) + sum(tensor.nbytes for tensor in tensors.values())
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            problems.append(
                Problem(
                    f"{folder / name} is missing or cut off, though its rank wrote it",
                    "write where every machine sees the same files",
                )
            )
    return problems


def copy_kept(folder: Path, layout: HubLayout, plan: FilePlan, advance: Callable[[int], None] = lambda _: None) -> None:
    """Copy the tensors that come from another folder, after all others are written.

    Args:
        folder: to write into. Files without other tensors do not exist yet.
        layout: names the tensors to copy.
        plan: the file of every tensor.
        advance: called with the number of bytes that were copied.
    """
    for name, members in plan.files.items():
        kept = [hub for hub in members if hub in layout.kept]
        header, offsets = _header({hub: layout.tensors[hub] for hub in members})
        if kept and not (folder / name).exists():
            (folder / name).write_bytes(header)
        if kept:
            with (folder / name).open("r+b") as file:
                for hub in kept:
                    file.seek(offsets[hub])
                    _copy_bytes(layout.kept[hub], file, advance)
                file.flush()
                os.fsync(file.fileno())


def _copy_bytes(tensor: FileTensor, file: BinaryIO, advance: Callable[[int], None]) -> None:
    left = math.prod(tensor.shape) * tensor.dtype.itemsize
    with tensor.path.open("rb") as source:
        source.seek(tensor.start)
        while left:
            part = source.read(min(left, COPIED_BYTES))
            if not part:
                raise OSError(f"{tensor.path} ends within {tensor.name}")
            file.write(part)
            advance(len(part))
            left -= len(part)


class FileWriter:
    """Writes tensors into the files of a folder, in any order.

    Args:
        folder: to write into. It exists.
        layout: shape and number format of every tensor.
        plan: the file of every tensor.
    """

    def __init__(self, folder: Path, layout: HubLayout, plan: FilePlan) -> None:
        self._folder, self._layout, self._plan = folder, layout, plan
        self._offsets: dict[str, int] = {}
        self._name = ""
        self._stream: BinaryIO | None = None
        self._started: set[str] = set()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the folder.

        Args:
            tensor: on the CPU, in the shape and number format of the layout.
        """
        wanted = self._layout.tensors[name]
        assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype), f"{name} differs from its layout"
        stream = self._open(self._plan.file_of[name])
        stream.seek(self._offsets[name])
        # The tensor is written as bytes, because numpy does not know all of its number formats.
        stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Flush the last file to the disk, and close it."""
        if self._stream is not None:
            with self._stream as stream:
                self._stream = None
                stream.flush()
                os.fsync(stream.fileno())

    def _open(self, name: str) -> BinaryIO:
        if name != self._name or self._stream is None:
            self.close()
            self._name = name
            self._stream = (self._folder / name).open("r+b" if name in self._started else "wb")
            if name not in self._started:
                self._start(name, self._stream)
        return self._stream

    def _start(self, name: str, stream: BinaryIO) -> None:
        header, offsets = _header({hub: self._layout.tensors[hub] for hub in self._plan.files[name]})
        stream.write(header)
        self._offsets |= offsets
        self._started.add(name)


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the start of a file, and name -> offset of each tensor in the file, in bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in _order(tensors):
        tensor = tensors[name]
        offsets[name] = end
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
        table[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + offset for name, offset in offsets.items()}


def _order(tensors: Mapping[str, Tensor]) -> Sequence[str]:
    return sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name.encode()))
