"""Any block of recorded moves of values, against the same moves of tensors in memory."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshtrain.models.weights import block_reader
from meshtrain.models.weights import operations as moves
from meshtrain.models.weights.block_reader import BlockReader
from meshtrain.models.weights.lazy_tensor import LazyTensor, NotRecordedError, lazy_tensor_in_file
from meshtrain.models.weights.safetensors_files import read_header

Move = Callable[[Mapping[str, Tensor]], Tensor]
MOVES: dict[str, Move] = {
    "as it is": lambda t: t["a"],
    "a matrix": lambda t: t["m"],
    "joined": lambda t: torch.cat([t["a"], t["b"]], -2),
    "experts": lambda t: torch.cat([torch.stack([t["a"][i] for i in (2, 0, 7)]), torch.stack([*t["b"][:3]])], dim=1),
    "stacked last": lambda t: torch.stack([t["a"], t["b"]], -1),
    "interleaved": lambda t: t["a"].reshape(8, 3, 2, 10).transpose(1, 2).reshape(8, 6, 10).contiguous(),
    "a chunk": lambda t: torch.chunk(t["c"], 3, dim=0)[1].contiguous(),
    "a split": lambda t: t["m"].split([10, 20, 10])[1],
    "turned": lambda t: t["a"].transpose(1, 2).contiguous(),
    "turned round": lambda t: t["a"].permute(2, 0, 1).clone(),
    "a matrix turned": lambda t: t["m"].t(),
    "rotary halves": lambda t: t["c"].view(4, 3, 2, 5).transpose(1, 2).reshape(24, 5),
    "unflattened": lambda t: t["a"].unflatten(1, (2, -1)),
    "flattened": lambda t: t["a"].flatten(0, 1),
    "one of many": lambda t: torch.chunk(t["a"], 8, dim=0)[3].squeeze(0),
    "a column": lambda t: t["m"][:, 3].unsqueeze(1),
}


@pytest.fixture(scope="module")
def values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(8, 6, 10),
        "b": torch.randn(8, 6, 10),
        "c": torch.randn(24, 5).bfloat16(),
        "m": torch.randn(40, 37),
    }


@pytest.fixture
def origins(values: dict[str, Tensor], tmp_path: Path) -> dict[str, Tensor]:
    save_file(values, tmp_path / "model.safetensors")
    return {name: lazy_tensor_in_file(tensor) for name, tensor in read_header(tmp_path / "model.safetensors").items()}


@pytest.fixture(params=["small buffers", "large buffers"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small limits, so that tensors are read at once, row by row, or by parts of rows."""
    if request.param == "small buffers":
        monkeypatch.setattr(block_reader, "BOUNCE_BYTES", 32)
        monkeypatch.setattr(block_reader, "FRESH_BYTES", 100)
        monkeypatch.setattr(block_reader, "SHORTEST_RUN_BYTES", 64)
        monkeypatch.setattr(moves, "RESHAPED_BYTES", 300)
        monkeypatch.setattr(moves, "FEW_ROWS", 3)


def random_block(draw: np.random.Generator, shape: torch.Size) -> list[slice]:
    ranges = []
    for length in shape:
        start, stop = sorted(draw.integers(0, length + 1, 2).tolist())
        ranges.append(slice(0, length) if draw.random() < 0.4 else slice(start, stop))
    return ranges


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_any_block_is_read_correctly(move: Move, values: dict[str, Tensor], origins: dict[str, Tensor]) -> None:
    whole, origin = move(values), move(origins)
    assert isinstance(origin, LazyTensor)
    assert (origin.shape, origin.dtype) == (whole.shape, whole.dtype)
    draw = np.random.default_rng(0)
    with BlockReader() as reader:
        for number in range(60):
            ranges = random_block(draw, whole.shape)
            wanted = whole[tuple(ranges)].to(torch.float64 if number % 3 == 0 else whole.dtype)
            turned = number % 4 == 0 and wanted.dim() > 1
            found = torch.full_like(wanted.transpose(0, 1) if turned else wanted, torch.nan)
            found = found.transpose(0, 1) if turned else found
            origin.read(ranges, found, reader)
            assert torch.equal(found, wanted), ranges


def test_computation_is_not_recorded(origins: dict[str, Tensor]) -> None:
    for compute in (lambda t: t * 2, lambda t: t[::2], lambda t: t.to(torch.float64), lambda t: t.sum()):
        with pytest.raises(NotRecordedError):
            compute(origins["m"])


def test_parts_that_do_not_fit_are_not_joined(origins: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"shapes \(8, 6, 10\), \(7, 6, 10\)"):
        torch.cat([origins["a"], origins["b"][1:]], 1)
