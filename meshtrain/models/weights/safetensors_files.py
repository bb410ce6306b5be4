"""Read the headers of safetensors files: the position of each tensor, without mapping a file.

Mapped pages count as memory of the process that has touched them, so a mapped file of 5 GB appears
as 5 GB of used memory.
Source of the format: the README of https://github.com/huggingface/safetensors, "Format".
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshtrain.errors import ModelError, name_some

SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
# The limit of the reference implementation: a larger number is not a header length but garbage.
LONGEST_HEADER_BYTES = 100_000_000
DTYPE_OF_CODE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_QUANTIZED = re.compile(r"F[468]_.*")


@dataclass(frozen=True)
class FileTensor:
    """The position of one tensor in a file.

    Attributes:
        path: of the file.
        name: of the tensor in the file.
        dtype: of the values.
        shape: lengths of the dimensions. The values are stored in row-major order.
        start: byte of the file at which the values begin.
    """

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def find_tensors(source: Path) -> dict[str, FileTensor]:
    """Return every tensor of a Hugging Face directory by its name in the files.

    Args:
        source: a local directory with model.safetensors, or else with an index and the files that
            it names.

    Raises:
        ModelError: if files are missing, broken, or of an unsupported kind.
    """
    if not source.is_dir():
        raise ModelError(f"{source} is not a directory", f"use a local Hugging Face directory with {SINGLE_NAME}")
    # If both exist, one of them is a leftover. `from_pretrained` uses the same order.
    if (source / SINGLE_NAME).is_file():
        return read_header(source / SINGLE_NAME)
    if (source / INDEX_NAME).is_file():
        return _find_by_index(source / INDEX_NAME)
    if any(source.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{source} has its weights in pytorch_model.bin, a pickle",
            f'convert it: AutoModelForCausalLM.from_pretrained("{source}").save_pretrained(...)',
        )
    if linked := [name for name in (SINGLE_NAME, INDEX_NAME) if (source / name).is_symlink()]:
        raise ModelError(
            f"{source / linked[0]} is a link to {(source / linked[0]).readlink()}, which does not exist",
            "download the model again",
        )
    raise ModelError(f"{source} has neither {SINGLE_NAME} nor {INDEX_NAME}", "use a directory that holds the weights")


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of one file by name.

    Raises:
        ModelError: if it is not an intact safetensors file, or holds numbers of a type that cannot
            be trained.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            beginning = file.read(8)
            if beginning == b"version ":
                raise ModelError(
                    f"{path} is a git-lfs pointer instead of weights", "run `git lfs pull` in its directory"
                )
            length = int.from_bytes(beginning, "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER_BYTES):
                raise ValueError(f"its header has {length:,} bytes, the file {size:,}")
            header = json.loads(file.read(length))
        return _parse(path, _checked(header), 8 + length, size)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error})", "it may be truncated, so download it again") from error


def _checked(header: Any) -> dict[str, dict[str, Any]]:
    """Return the entry of each tensor in a header.

    Raises:
        ValueError: if an entry is not valid.
    """
    if not isinstance(header, dict):
        raise ValueError("its header is not a table")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        for key, is_right in _ENTRY.items():
            found = entry.get(key) if isinstance(entry, dict) else None
            if not is_right(found):
                raise ValueError(f"its header has {found!r} as the {key} of {name}")
    return header


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(number, int) for number in value)


_ENTRY: dict[str, Callable[[Any], bool]] = {
    "dtype": lambda value: isinstance(value, str),
    "shape": _are_numbers,
    "data_offsets": lambda value: _are_numbers(value) and len(value) == 2,
}


def _parse(path: Path, header: Mapping[str, Any], first_byte: int, size: int) -> dict[str, FileTensor]:
    tensors, end = {}, first_byte
    # The values follow each other without gaps, so a truncated or overwritten file shows here.
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _dtype(path, name, entry["dtype"]), tuple(int(length) for length in entry["shape"])
        begin, stop = (first_byte + int(offset) for offset in entry["data_offsets"])
        if begin != end or stop - begin != math.prod(shape) * dtype.itemsize or stop > size:
            raise ValueError(f"{name} of shape {shape} has offsets for bytes {begin:,} to {stop:,} of {size:,}")
        tensors[name] = FileTensor(path, name, dtype, shape, begin)
        end = stop
    if end != size:
        raise ValueError(f"its tensors end at byte {end:,} of {size:,}")
    return tensors


def _dtype(path: Path, name: str, code: str) -> torch.dtype:
    if code in DTYPE_OF_CODE:
        return DTYPE_OF_CODE[code]
    if _QUANTIZED.fullmatch(code):
        raise ModelError(
            f"{path} holds {name} in {code}: quantized weights, which need their scales",
            "dequantize the model first, or use its bfloat16 version",
        )
    raise ModelError(f"{path} holds {name} in {code}, which is not supported", f"use one of {', '.join(DTYPE_OF_CODE)}")


def _find_by_index(index: Path) -> dict[str, FileTensor]:
    try:
        files = _weight_map(json.loads(index.read_text()))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{index} is not an index of safetensors files ({error})", "download the model again"
        ) from error
    paths = {name: index.parent / file for name, file in files.items()}
    if absent := sorted({path.name for path in paths.values() if not path.is_file()}):
        raise ModelError(f"{index} names files that are not there: {name_some(absent)}", "download the model again")
    headers = {path: read_header(path) for path in dict.fromkeys(paths.values())}
    for name, path in paths.items():
        if name not in headers[path]:
            raise ModelError(f"{path} lacks {name}, which its index lists", "download the model again")
    return {name: headers[path][name] for name, path in paths.items()}


def _weight_map(table: Any) -> dict[str, str]:
    files = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError("it has no table weight_map from names to files")
    return files
