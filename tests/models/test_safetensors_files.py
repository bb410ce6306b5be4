"""The header of a safetensors file, and files that are not valid."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshtrain.errors import ModelError
from meshtrain.models.weights.block_reader import BlockReader
from meshtrain.models.weights.safetensors_files import DTYPE_OF_CODE, read_header

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path: Path, header: object, num_bytes: int = 24, length: int | None = None) -> Path:
    text = json.dumps(header).encode().ljust(92)
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_header(path)
    (problem,) = caught.value.lines
    return problem


def test_every_number_format_is_found_at_its_offset(tmp_path: Path) -> None:
    values = {code: (torch.rand(3, 5) * 100).to(dtype) for code, dtype in DTYPE_OF_CODE.items()}
    save_file({**values, "empty": torch.zeros(0, 4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = read_header(tmp_path / "model.safetensors")
    assert tensors.pop("empty").shape == (0, 4)
    with BlockReader() as reader:
        for name, tensor in tensors.items():
            found = torch.zeros(tensor.shape, dtype=tensor.dtype)
            reader.read(tensor, [slice(0, 3), slice(0, 5)], found)
            assert torch.equal(found, values[name])


@pytest.mark.parametrize(
    ("changes", "num_bytes", "reason"),
    [
        ({}, 20, "a of shape (2, 3) has offsets for bytes 100 to 124 of 120"),
        ({}, 25, "its tensors end at byte 124 of 125"),
        ({"shape": [2, 4]}, 24, "a of shape (2, 4) has offsets for bytes 100 to 124 of 124"),
        ({"data_offsets": [4, 28]}, 28, "a of shape (2, 3) has offsets for bytes 104 to 128 of 128"),
        ({"data_offsets": [0, -2]}, 24, "a of shape (2, 3) has offsets for bytes 100 to 98 of 124"),
        ({"data_offsets": 3}, 24, "its header has 3 as the data_offsets of a"),
    ],
)
def test_tensor_with_impossible_offsets_is_refused(
    tmp_path: Path, changes: dict[str, Any], num_bytes: int, reason: str
) -> None:
    path = write(tmp_path / "model.safetensors", {"a": {**ENTRY, **changes}}, num_bytes)
    assert refusal(path).startswith(f"{path} cannot be read ({reason}")
    assert refusal(path).endswith("); it may be truncated, so download it again")


@pytest.mark.parametrize(
    ("header", "length", "reason"),
    [
        ({}, 1000, "its header has 1,000 bytes, the file 100"),
        ({}, 2**63, "its header has 9,223,372,036,854,775,808 bytes, the file 100"),
        ([], None, "its header is not a table"),
        ({"a": {"dtype": "F32"}}, None, "its header has None as the shape of a"),
    ],
)
def test_invalid_header_is_refused(tmp_path: Path, header: object, length: int | None, reason: str) -> None:
    path = write(tmp_path / "model.safetensors", header, 0, length)
    assert refusal(path).startswith(f"{path} cannot be read ({reason})")


def test_pointer_of_git_lfs_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert refusal(path) == (f"{path} is a git-lfs pointer instead of weights; run `git lfs pull` in its directory")


def test_file_shorter_than_any_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    assert "its header has" in refusal(tmp_path / "model.safetensors")


def test_number_formats_that_cannot_be_trained_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": {**ENTRY, "dtype": "F8_E4M3"}})
    assert refusal(path) == (
        f"{path} holds a in F8_E4M3: quantized weights, which need their scales; dequantize the model first, or use "
        "its bfloat16 version"
    )
    path = write(tmp_path / "model.safetensors", {"a": {**ENTRY, "dtype": "C64"}})
    assert refusal(path).startswith(f"{path} holds a in C64, which is not supported; use one of F64, F32,")


def test_file_that_shrinks_during_a_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": ENTRY})
    tensor = read_header(path)["a"]
    path.write_bytes(b"")
    with BlockReader() as reader, pytest.raises(ModelError, match="became shorter while it was read"):
        reader.read(tensor, [slice(0, 2), slice(0, 3)], torch.zeros(2, 3))


def test_file_that_is_removed_during_a_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": ENTRY})
    tensor = read_header(path)["a"]
    path.unlink()
    with BlockReader() as reader, pytest.raises(ModelError) as caught:
        reader.read(tensor, [slice(0, 2), slice(0, 3)], torch.zeros(2, 3))
    assert str(caught.value) == f"{path} cannot be read (No such file or directory); check its disk"
