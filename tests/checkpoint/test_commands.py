"""The `meshtrain checkpoint` commands: output, exit codes, and that they change no files."""

import json
import os
import shutil
from pathlib import Path

import pytest
from transformers import GPT2LMHeadModel

from meshtrain import cli
from meshtrain.checkpoint.dcp.store import write_checkpoint
from meshtrain.checkpoint.storage.location import open_location
from meshtrain.checkpoint.storage.publishing import Retention
from tests.checkpoint.stages import build_plain, manifest_of
from tests.models.gpt2 import GPT2, TIED

INTACT = "step-2 is intact: 2 files, "


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run directory with two checkpoints, in the current directory."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        write_checkpoint(
            Path("run/checkpoints"),
            build_plain(filled=True),
            manifest=manifest_of(step, mesh={"pp": 2, "tp": 4, "dp_shard": 1}, evaluation_loss=1.5 / step),
            huggingface=None,
            retention=Retention(newest=2),
        )
    return Path("run")


def files(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_list_shows_the_newest_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["checkpoint", "list", "run"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "step-" in line]
    assert ["step-2" in rows[0], "step-1" in rows[1]] == [True, True]
    for word in ("0.7500", "pp 2 x tp 4", "LlamaForCausalLM", "float32"):
        assert word in rows[0]


def test_verify_reads_every_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["checkpoint", "verify", "run"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"run/checkpoints/{INTACT}")
    assert second.startswith("run/checkpoints/step-1 is intact: ")
    assert cli._exit_code(["checkpoint", "verify", "run/checkpoints/step-2"]) == 0
    assert capsys.readouterr().out.startswith(f"run/checkpoints/{INTACT}")


def newer_format(checkpoint: Path) -> None:
    fields = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(fields | {"format_version": 9}))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda step: (step / "manifest.json").write_text("no JSON"), "/manifest.json is broken (Expecting value"),
        (newer_format, "/manifest.json has format version 9, but this meshtrain reads 2; use the meshtrain that"),
        (lambda step: (step / "notes.txt").touch(), " holds files that are not its own: notes.txt; move them away"),
        (lambda step: os.truncate(step / ".metadata", 9), "/.metadata has 9 bytes and should have "),
        (lambda step: shutil.rmtree(step) or step.write_text(""), ""),
    ],
    ids=["not JSON", "newer format", "foreign file", "cut off", "a file"],
)
def test_damage_is_a_one_line_error_and_nothing_changes(
    root: Path, capsys: pytest.CaptureFixture[str], damage, problem: str
) -> None:
    step = root / "checkpoints" / "step-2"
    damage(step)
    before = files(root)
    assert cli._exit_code(["checkpoint", "verify", "run"]) == (2 if problem else 0)
    shown = capsys.readouterr()
    if problem:
        (line,) = shown.err.splitlines()
        assert line.startswith(f"error: run/checkpoints/step-2{problem}")
    # The other checkpoint is verified nevertheless.
    assert "run/checkpoints/step-1 is intact: " in shown.out
    assert files(root) == before


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["list", "nowhere"],
            "nowhere is not a checkpoint: it is not a directory; use a step-N",
        ),
        (
            ["verify", "."],
            ". is not a checkpoint: it has no manifest.json and no step-N directory; ",
        ),
        (["list", "s3://bucket/run"], "s3://bucket/run cannot be reached: Install s3fs to access S3"),
        (["list", "http://localhost:9/run"], "http://localhost:9/run cannot be r"),
        (["convert", "nowhere", "out"], "nowhere is not a checkpoint: it is not a directory"),
    ],
)
def test_wrong_arguments_are_one_line_errors(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    before = files(root)
    assert cli._exit_code(["checkpoint", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {problem}")
    assert files(root) == before


def test_run_behind_a_url_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT2LMHeadModel(GPT2)
    write_checkpoint(
        open_location("memory://behind/checkpoints"),
        {f"model.{name}": value for name, value in model.named_parameters()},
        manifest=manifest_of(3, architecture="GPT2LMHeadModel", tied=TIED),
        huggingface=model.config.save_pretrained,
        retention=Retention(newest=1),
    )
    assert cli._exit_code(["export", "memory://behind", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "memory://behind/checkpoints/step-3 is the newest checkpoint" in capsys.readouterr().out
