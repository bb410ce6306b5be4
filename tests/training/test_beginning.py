"""A run without a checkpoint starts at step 0 only if it has never saved one."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME
from meshtrain.config.run import CheckpointConfig, RunConfig
from meshtrain.config.toml import dump_toml
from tests.chaos.stops import FAULTY, torchrun
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, read_metrics, steps_of, train_here
from tests.training.test_resume import in_float32, refusal, train_on_ranks, without_torchrun

HOW_TO_BEGIN = "To start again at step 0, choose another run_directory or remove out/metrics.jsonl"
WHERE = "restore the checkpoint, or set checkpoint.directory to where it is. "


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Return a run of two steps that saved at its end."""
    place = tmp_path_factory.mktemp("saved")
    config = build_run(place / "out", "gpt2", build_plan((1, 1, 1, 1)), steps=2, checkpoint=CheckpointConfig())
    train_on_ranks(config)
    return config


@pytest.fixture
def copied(saved: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Return a copy of the saved run, whose metrics end as after a kill."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(Path(saved.run_directory), "out")
    with Path("out/metrics.jsonl").open("a") as file:
        file.write('null\n[3]\n\0\0\n{"step": 2, "checkpoint": 5}\n{"step": 9, "lo')
    return saved.model_copy(update={"run_directory": str(tmp_path / "out")})


def remove_all(out: Path) -> None:
    shutil.rmtree(out / CHECKPOINTS_NAME)


def empty(out: Path) -> None:
    shutil.rmtree(out / CHECKPOINTS_NAME / "step-2")


def remove_manifest(out: Path) -> None:
    (out / CHECKPOINTS_NAME / "step-2" / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        (remove_all, "out/checkpoints does not exist"),
        (empty, "out/checkpoints holds no checkpoint"),
        (remove_manifest, "out/checkpoints/step-2 has no manifest.json"),
    ],
)
def test_run_whose_checkpoint_is_missing_is_refused(
    saved: RunConfig, copied: RunConfig, damage: Callable[[Path], None], missing: str
) -> None:
    damage(Path(copied.run_directory))
    before = Path("out/metrics.jsonl").read_bytes()
    where = f"{saved.run_directory}/checkpoints/step-2"
    message = f"out/metrics.jsonl ends with step 2, and {where} was saved, but {missing}; {WHERE}{HOW_TO_BEGIN}"
    assert refusal(copied) == [message]
    assert Path("out/metrics.jsonl").read_bytes() == before


def test_other_checkpoint_directory_is_refused_until_the_metrics_are_removed(copied: RunConfig) -> None:
    other = copied.model_copy(update={"checkpoint": CheckpointConfig(directory=str(Path("elsewhere").absolute()))})
    Path("run.toml").write_text(dump_toml(other))
    for verb in (["train", "run.toml"], ["check", "run.toml", "--world-size", "1"]):
        command = [sys.executable, "-m", "meshtrain", *verb]
        shown = subprocess.run(command, capture_output=True, text=True, env=without_torchrun())
        assert shown.returncode == 2
        assert shown.stderr.startswith("error: out/metrics.jsonl ends with step 2, and ")
        assert shown.stderr.endswith(f" was saved, but elsewhere does not exist; {WHERE}{HOW_TO_BEGIN}\n")
        assert len(shown.stderr.splitlines()) == 1
    Path("out/metrics.jsonl").unlink()
    assert list(train_on_ranks(other)) == [0, 1]
    assert [metrics["step"] for metrics in steps_of(Path("out"))] == [1, 2]
    assert Path("elsewhere/step-2/manifest.json").is_file()


def test_run_killed_before_its_first_save_restarts_from_the_beginning(tmp_path: Path) -> None:
    config = build_run(
        tmp_path / "out", "gpt2", in_float32((2, 1, 1, 1)), steps=8, checkpoint=CheckpointConfig(every=7)
    )
    (tmp_path / "run.toml").write_text(dump_toml(config))
    (*options, script), fault = torchrun(str(FAULTY)), ("kill", "1", "4", "1", "train", str(tmp_path / "run.toml"))
    command = [*options, "--max-restarts", "1", script, *fault]
    shown = subprocess.run(command, capture_output=True, text=True, env=without_torchrun(), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert (
        "out/metrics.jsonl ends with step 3, but no checkpoint was saved: the run starts at step 0 again\n"
        in shown.stdout
    )
    assert [metrics["step"] for metrics in steps_of(tmp_path / "out")] == [1, 2, 3, 4, 5, 6, 7, 8]
    places = [metrics["checkpoint"] for metrics in read_metrics(tmp_path / "out") if "checkpoint" in metrics]
    assert places == [f"{tmp_path}/out/checkpoints/step-{step}" for step in (7, 8)]


def test_background_checkpoint_counts_when_it_is_complete(tmp_path: Path) -> None:
    saving = CheckpointConfig(every=1, in_background=True)
    config = build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1)), steps=2, checkpoint=saving)
    train_on_ranks(config)
    objects = [metrics for metrics in read_metrics(tmp_path / "out") if "checkpoint" in metrics]
    assert [metrics["step"] for metrics in objects] == [1, 2]
    assert all("checkpoint_background_seconds" in metrics for metrics in objects)
    assert json.dumps(objects[-1]).endswith('step-2"}')


def test_run_that_keeps_no_checkpoint_writes_none_and_begins_again(tmp_path: Path) -> None:
    changes = {"steps": 3, "checkpoint": CheckpointConfig(keep=0)}
    config = build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1)), **changes)
    for stop_after, said in (
        ("0s", "Stopped by stop_after: 1 of 3 steps are done; no checkpoint was saved"),
        (None, "step 3/3"),
    ):
        (shown,) = run_on_ranks(1, lines_of_training, config.model_copy(update={"stop_after": stop_after}), joins=False)
        assert said in shown
        assert not (tmp_path / "out" / CHECKPOINTS_NAME).exists()
    assert "metrics.jsonl ends with step 1, but no checkpoint was saved: the run starts at step 0 again" in shown
    assert [metrics["step"] for metrics in steps_of(tmp_path / "out")] == [1, 2, 3]


def lines_of_training(config: RunConfig) -> str:
    with redirect_stdout(StringIO()) as screen:
        train_here(config)
    return screen.getvalue()
