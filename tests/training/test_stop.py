"""Runs stop, restart and fail, with real processes and signals."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME
from meshtrain.config.run import CheckpointConfig, EvaluationConfig, LoggingConfig, RunConfig
from meshtrain.config.toml import dump_toml
from meshtrain.training import loop
from meshtrain.training.run import Ending, train_run
from tests.chaos.elastic import lose_a_machine
from tests.chaos.stops import FAULTY, children_of, is_running, torchrun
from tests.ranks import run_on_ranks
from tests.training.runs import build_run
from tests.training.test_resume import assert_same_bits, in_float32, train_on_ranks, wait_for, without_torchrun

ALONE = [sys.executable, "-m", "meshtrain"]
RESTART = 75


@pytest.fixture
def undisturbed_run(tmp_path: Path) -> RunConfig:
    """Return a run on two ranks without a disturbance."""
    config = build_run(
        tmp_path / "whole", "gpt2-dropout", in_float32((2, 1, 1, 1)), steps=16, checkpoint=CheckpointConfig(every=3)
    )
    train_on_ranks(config)
    return config


def disturbed(undisturbed_run: RunConfig, name: str, **changes: Any) -> tuple[RunConfig, str]:
    """Return the same run in another directory, and its file."""
    directory = Path(undisturbed_run.run_directory).with_name(name)
    config = undisturbed_run.model_copy(update={"run_directory": str(directory), **changes})
    file = directory.with_suffix(".toml")
    file.write_text(dump_toml(config))
    return config, str(file)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**without_torchrun(), **environment}
    )


def start(*command: str) -> subprocess.Popen[str]:
    """Start a command and capture its output."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=without_torchrun()
    )


def test_signal_on_one_rank_makes_all_save_the_same_step(undisturbed_run: RunConfig) -> None:
    config, file = disturbed(undisturbed_run, "asked")
    command = torchrun("-m", "meshtrain", "train", file)
    process = start(*command)
    wait_for(Path(config.run_directory) / CHECKPOINTS_NAME / "step-3", process=process)
    os.kill(children_of(process.pid)[1], signal.SIGUSR1)
    shown, _ = process.communicate(timeout=100)
    assert process.returncode == 0, shown
    found = re.search(r"Saved (\S+step-(\d+))\nStopped by SIGUSR1: (\d+) of 16 steps are done; .* from there\n$", shown)
    assert found, shown
    assert found[2] == found[3]
    assert Path(found[1]).is_dir()
    again = run(*command)
    assert again.returncode == 0, again.stderr
    assert f"step {found[2]} done" in again.stdout
    assert_same_bits(undisturbed_run, config)


def test_other_ranks_continue_when_one_is_preempted(undisturbed_run: RunConfig) -> None:
    """Send SIGTERM to one rank, as for a preempted machine: its torchrun ends, others continue."""
    config, file = disturbed(undisturbed_run, "preempted")
    process = start(*torchrun("--max-restarts", "1", "-m", "meshtrain", "train", file))
    wait_for(Path(config.run_directory) / CHECKPOINTS_NAME / "step-3", process=process)
    os.kill(children_of(process.pid)[1], signal.SIGTERM)
    shown, _ = process.communicate(timeout=200)
    assert process.returncode == 0, shown
    found = re.search(r"^Stopped by SIGTERM: (\d+) of 16 steps are done", shown, re.M)
    assert found, shown
    assert f"step {found[1]} done" in shown
    assert_same_bits(undisturbed_run, config)


def test_all_ranks_end_when_the_store_stops_answering(
    undisturbed_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeze torchrun, which hosts the store: like a cut link, it closes no connection."""
    # With several machines the launch scripts set 1, so that rank 0 hosts the store.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    config, file = disturbed(undisturbed_run, "silent", steps=100_000, logging=LoggingConfig(every=100_000))
    process = start(*torchrun("-m", "meshtrain", "train", file))
    wait_for(Path(config.run_directory) / CHECKPOINTS_NAME / "step-3", process=process)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGSTOP)
    frozen = time.monotonic()
    while any(map(is_running, workers)) and time.monotonic() < frozen + 100:
        time.sleep(0.1)
    assert not any(map(is_running, workers))
    process.kill()
    shown, _ = process.communicate(timeout=100)
    assert re.search(r"^rank 1 stops: rank 0 on \S+ and the store on its machine do not answer: ", shown, re.M), shown


def test_time_limit_of_a_single_process_has_its_own_exit_code(tmp_path: Path) -> None:
    config = build_run(tmp_path / "out", "gpt2", in_float32((1, 1, 1, 1)), stop_after="0s")
    (tmp_path / "run.toml").write_text(dump_toml(config))
    stopped = run(*ALONE, "train", str(tmp_path / "run.toml"))
    assert (stopped.returncode, stopped.stderr) == (RESTART, "")
    assert stopped.stdout.endswith(
        "step-1\nStopped by stop_after: 1 of 6 steps are done; the same command resumes from there\n"
    )
    ended = run(*ALONE, "train", str(tmp_path / "run.toml"), "stop_after=1h")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "step 1 done" in ended.stdout


def train_with_a_signal_in_evaluation(config: RunConfig) -> Ending:
    evaluate = loop.evaluate

    def evaluate_long(*arguments: Any) -> tuple[float, int]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return evaluate(*arguments)

    loop.evaluate = evaluate_long
    return train_run(config)


def test_stop_request_during_an_evaluation_is_obeyed_before_the_next_step(tmp_path: Path) -> None:
    config = build_run(
        tmp_path / "out", "gpt2", in_float32((1, 1, 1, 1)), evaluation=EvaluationConfig(every=2, max_batches=1)
    )
    config = config.model_copy(update={"data": config.data.model_copy(update={"validation": 0.2})})
    assert run_on_ranks(1, train_with_a_signal_in_evaluation, config, joins=False) == [Ending.ASKED]
    (saved,) = (tmp_path / "out" / CHECKPOINTS_NAME).iterdir()
    assert saved.name == "step-2"
    assert read_manifest(saved).evaluation_loss is not None


@pytest.mark.parametrize("share", ["0", "1"])
def test_torchrun_restarts_a_run_that_lost_a_rank(undisturbed_run: RunConfig, share: str) -> None:
    """With the store that torchrun keeps over a restart, and with a new one."""
    config, file = disturbed(undisturbed_run, "killed")
    (*options, script), fault = torchrun(str(FAULTY)), ("kill", "1", "8", "1", "train", file)
    restarted = run(*options, "--max-restarts", "2", script, *fault, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=share)
    assert restarted.returncode == 0, restarted.stderr
    assert "rank 0 stops: rank 1 on" in restarted.stderr
    assert restarted.stdout.count("Resumed from") == 1
    assert "step 6 done" in restarted.stdout
    assert not (Path(config.run_directory) / "failure.json").exists()
    assert_same_bits(undisturbed_run, config)


def test_run_continues_when_one_of_two_machines_is_lost(tmp_path: Path) -> None:
    """`python -m tests.chaos.elastic` also tests the store that torchrun keeps over a restart."""
    lose_a_machine(tmp_path)
