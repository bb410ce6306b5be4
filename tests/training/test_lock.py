"""Only one run uses a run directory at a time; with real processes and kills."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME, list_checkpoints
from meshtrain.checkpoint.storage.named_folder import locked_folder
from meshtrain.config.run import CheckpointConfig, LoggingConfig, RunConfig
from meshtrain.config.toml import dump_toml
from meshtrain.errors import CheckpointError, ConfigError, TrainingStopped
from meshtrain.runtime.claims import list_claims
from meshtrain.training.hooks import Hook, Metrics, RunState
from meshtrain.training.lock import locked_run
from meshtrain.training.run import train_run
from tests.chaos.stops import children_of, is_running, torchrun
from tests.ranks import run_on_ranks
from tests.training.runs import build_run
from tests.training.test_resume import in_float32, wait_for
from tests.training.test_stop import ALONE, run, start


def config_of(directory: Path, name: str = "out", **changes: Any) -> RunConfig:
    """Return a run on one rank."""
    return build_run(directory / name, "gpt2", in_float32((1, 1, 1, 1)), **changes)


def test_second_run_is_refused_and_workers_end_with_their_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 0 then hosts the store, so that no connection breaks when torchrun is killed.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    changes = {"steps": 100_000, "logging": LoggingConfig(every=100_000), "checkpoint": CheckpointConfig(every=3)}
    config = build_run(tmp_path / "out", "gpt2", in_float32((2, 1, 1, 1)), **changes)
    file, out = tmp_path / "run.toml", Path(config.run_directory)
    file.write_text(dump_toml(config))
    first = start(*torchrun("-m", "meshtrain", "train", str(file)))
    wait_for(out / CHECKPOINTS_NAME / "step-3", process=first)
    workers = children_of(first.pid)

    second = run(*ALONE, "train", str(file))
    assert (second.returncode, second.stdout) == (2, "")
    assert re.fullmatch(
        rf"error: run_directory = {out} is in use by process ({workers[0]}|{workers[1]}) on \S+ of torchrun job \S+, "
        r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S+; wait until it ends, end it, or choose another run_directory\n",
        second.stderr,
    ), second.stderr

    first.kill()
    killed = time.monotonic()
    again = start(*torchrun("-m", "meshtrain", "train", str(file), "stop_after=0s"))
    while any(map(is_running, workers)) and time.monotonic() < killed + 60:
        time.sleep(0.05)
    assert time.monotonic() - killed < 10
    shown, _ = first.communicate(timeout=60)
    assert shown.count(f"stops: torchrun (process {first.pid}), which started it, was killed\n") == 2
    shown, _ = again.communicate(timeout=200)
    assert again.returncode == 0, shown
    assert "Resumed from" in shown
    assert "may still be in use" not in shown
    assert list_claims(out) == []


@pytest.mark.parametrize("where", ["memory://shared", "first/checkpoints"])
def test_two_runs_with_one_checkpoint_directory_are_refused(tmp_path: Path, where: str) -> None:
    place = where if "://" in where else str(tmp_path / where)
    saving = CheckpointConfig(directory=place)
    first = config_of(tmp_path, "first", checkpoint=saving if "://" in where else CheckpointConfig())
    second = config_of(tmp_path, "second", checkpoint=saving)
    with locked_run(first), pytest.raises(ConfigError) as caught, locked_run(second):
        pass
    assert str(caught.value).startswith(f"checkpoint.directory = {place} is in use by process {os.getpid()} on ")
    assert str(caught.value).endswith("; wait until it ends, end it, or choose another checkpoint.directory")
    with locked_run(second):
        pass
    assert list_claims(UPath("memory://shared")) == []
    assert not (tmp_path / "second").exists()


def test_run_whose_folders_are_one_through_a_link_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    config = config_of(tmp_path / "link", checkpoint=CheckpointConfig(directory=str(tmp_path / "real" / "out")))
    with locked_run(config) as lock:
        assert len(lock.locks) == 1


def test_program_that_saves_into_a_run_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "out" / "checkpoints"
    held = f"^{root} is in use by process {os.getpid()} on "
    with locked_run(config_of(tmp_path)), pytest.raises(CheckpointError, match=held), locked_folder(root):
        pass
    with locked_folder(root), pytest.raises(ConfigError) as caught, locked_run(config_of(tmp_path)):
        pass
    assert str(caught.value).startswith(f"checkpoint.directory = {root} is in use by process {os.getpid()} on ")
    assert not (tmp_path / "out").exists()


def test_other_ranks_hold_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with locked_run(config_of(tmp_path)) as lock:
        assert lock.locks == ()


class TakenOver(Hook):
    """Acts like another machine that considers this process dead."""

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Remove the lock file after the first step."""
        for claim in list_claims(Path(state.config.run_directory)):
            claim.unlink()


def be_taken_over(config: RunConfig) -> tuple[str, list[int]]:
    with pytest.raises(TrainingStopped) as caught:
        train_run(config, [TakenOver()])
    out = Path(config.run_directory)
    return str(caught.value), [int(path.name.removeprefix("step-")) for path in list_checkpoints(out / "checkpoints")]


def test_run_that_lost_its_lock_stops_before_it_saves(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=6, checkpoint=CheckpointConfig(every=2))
    ((message, saved),) = run_on_ranks(1, be_taken_over, config, joins=False)
    assert message == (
        f"run_directory = {tmp_path}/out was taken over: this process, its disk or its network was suspended for "
        "more than 15 s; it stops, so that the other one can continue"
    )
    assert saved == []


def fail_at_first(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="no such"):
        train_run(config, [Failing()])


class Failing(Hook):
    """Raise what ends a run."""

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Fail."""
        assert len(list_claims(Path(state.config.run_directory))) == 1
        raise ConfigError("no such thing")


def test_exception_releases_the_lock(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_on_ranks(1, fail_at_first, config, joins=False)
    assert list_claims(Path(config.run_directory)) == []
