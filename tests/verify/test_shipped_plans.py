"""Every example run fits its plan at its real size, and is proven at a small one."""

from pathlib import Path

import pytest

from meshtrain import cli

RUNS = Path(__file__).parents[2] / "launch" / "runs"
WORLD_SIZES = {
    "quickstart": 4,
    "gpt2-124m": 1,
    "gpt2-xl-hybrid": 8,
    "gpt3-175b": 96,
    "gpt2-zero-offload": 1,
    "llama-65b": 16,
    "llama-tp4": 4,
}


def test_every_example_run_is_listed() -> None:
    assert {path.stem for path in RUNS.glob("*.toml")} == set(WORLD_SIZES)


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_example_run_fits_at_its_real_size(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["check", str(RUNS / f"{name}.toml"), "--world-size", str(WORLD_SIZES[name])]
    assert cli._exit_code([*arguments, f"run_directory={tmp_path}/out"]) == 0
    assert "The plan fits the model, the batches and the processes." in capsys.readouterr().out


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_example_run_is_proven(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["verify", str(RUNS / f"{name}.toml")]) == 0
    assert "computes what one device computes" in capsys.readouterr().out
