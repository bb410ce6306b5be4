"""`meshtrain train --processes` in real processes with signals: messages and exit codes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshtrain.config.run import CheckpointConfig, LoggingConfig
from meshtrain.config.toml import dump_toml
from meshtrain.runtime.launch import exit_code
from tests.chaos.stops import FAULTY, children_of, torchrun
from tests.training.runs import build_run, steps_of
from tests.training.test_resume import in_float32, without_torchrun

TRAIN = [sys.executable, "-m", "meshtrain", "train", "run.toml"]
TWO = [*TRAIN, "--processes", "2"]
MISTAKE = (
    "mesh: pp 2 x dp_replicate 1 x dp_shard 1 x ep 1 x cp 1 x tp 3 needs 6 processes, but there are 2; start 6, or "
)
LAUNCH = "from meshtrain.runtime.launch import run_workers; import sys; sys.exit(run_workers(sys.argv[1:], 2, "


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    changes = {"steps": 12, "checkpoint": CheckpointConfig(every=4), "logging": LoggingConfig(every=10**6)}
    config = build_run(tmp_path / "out", "gpt2", in_float32((2, 1, 1, 1)), **changes)
    Path("run.toml").write_text(dump_toml(config))


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env={**without_torchrun(), **environment})


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=without_torchrun())


def assert_one_error(error: str) -> None:
    """Check that the mistake is the only error; rank 1 may print it, too, if 5 s faster."""
    lines = [line.removeprefix("error: ").removeprefix("rank 1: ") for line in error.splitlines()]
    assert 1 <= len(lines) <= 2
    assert all(line.startswith(MISTAKE) for line in lines), error


def test_user_error_of_the_processes_is_one_line_without_a_restart() -> None:
    shown = run(*TWO, "--max-restarts", "2", "plan.mesh.tp=3")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert_one_error(shown.stderr)


def test_launch_module_ends_with_the_same_line_and_code() -> None:
    (_, _, _, *options) = torchrun("-m", "meshtrain", "train", "run.toml", "plan.mesh.tp=3")
    shown = run(sys.executable, "-m", "meshtrain.runtime.launch", *options)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert_one_error(shown.stderr)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_signal_saves_and_stops_all_processes(number: signal.Signals, code: int) -> None:
    process = start(*TWO, "steps=100000", "--max-restarts", "2")
    children_after(process, 4)
    process.send_signal(number)
    shown, error = process.communicate(timeout=200)
    assert (process.returncode, error) == (code, "")
    steps = len(steps_of(Path("out")))
    assert f"Saved out/checkpoints/step-{steps}\nStopped by " in shown
    assert shown.endswith(f"{steps} of 100,000 steps are done; the same command resumes from there\n")


def test_time_limit_has_its_own_exit_code() -> None:
    shown = run(*TWO, "stop_after=0s", "--max-restarts", "2")
    assert (shown.returncode, shown.stderr) == (75, "")
    assert shown.stdout.count("Stopped by stop_after: ") == 1


def test_killed_process_restarts_all_and_is_named_in_the_last_line() -> None:
    process = start(*TWO, "steps=100000", "--max-restarts", "1")
    workers = children_after(process, 4)
    os.kill(workers[1], signal.SIGKILL)
    while not set(children_of(process.pid)).isdisjoint(workers):
        time.sleep(0.1)
    newest = max(int(path.name.removeprefix("step-")) for path in Path("out/checkpoints").glob("step-*[0-9]"))
    os.kill(children_after(process, newest + 1)[1], signal.SIGKILL)
    _, error = process.communicate(timeout=200)
    first, again, second, last = error.splitlines()
    assert process.returncode == 3
    assert first.startswith("rank 0 stops: rank 1 on ")
    assert again == "warning: rank 1 ended with SIGKILL: all start again, 1 of 1"
    assert second.startswith("rank 0 stops: rank 1 on ")
    assert last == "error: rank 1 ended with SIGKILL"


def test_bug_shows_its_traceback_once_without_that_of_the_agent() -> None:
    faulty = [sys.executable, str(FAULTY), "raise", "1", "2", "1", "train", "run.toml"]
    shown = run(sys.executable, "-c", f"{LAUNCH} max_restarts=0))", *faulty)
    assert shown.returncode == 1
    assert shown.stderr.splitlines().count("ValueError: the fault of the test") == 1
    assert "distributed/elastic" not in shown.stderr
    assert "distributed/launcher" not in shown.stderr


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--max-restarts", "1"], "--max-restarts needs --processes; pass both, or leave it out"),
        (["--processes", "0"], "--processes 0: expected a whole number from 1, or `gpus`"),
        (
            ["--processes", "gpus"],
            "--processes gpus: this machine has no GPU; pass the number of processes to start on ",
        ),
        (["--processes", "2", "step=3"], "command line: step: unknown key; did you mean 'steps'?"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: list[str], line: str) -> None:
    shown = run(*TRAIN, *options, CUDA_VISIBLE_DEVICES="")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith(f"error: {line}")


def test_processes_option_under_torchrun_is_refused() -> None:
    shown = run(*TWO, RANK="0", WORLD_SIZE="1")
    line = "error: --processes starts processes, but torchrun has started this one; leave one of them out\n"
    assert (shown.returncode, shown.stderr) == (2, line)


@pytest.mark.parametrize(
    ("codes", "asked", "code"),
    [
        ([], None, 0),
        ([2, -15], None, 2),
        ([3, 1, -15], None, 1),
        ([3, -9], None, 3),
        ([75, -15], None, 75),
        ([75, 75], signal.SIGINT, 130),
        ([130, 3], None, 130),
        ([-10, -10], signal.SIGUSR1, 138),
        ([143, 143], signal.SIGINT, 130),
    ],
)
def test_exit_code_of_all_follows_from_those_of_the_processes(
    codes: list[int], asked: signal.Signals | None, code: int
) -> None:
    assert exit_code(codes, asked) == code


def children_after(process: subprocess.Popen[str], step: int) -> list[int]:
    """Return the workers when a checkpoint of this step or a later one exists."""
    for _ in range(3600):
        saved = [int(path.name.removeprefix("step-")) for path in Path("out/checkpoints").glob("step-*[0-9]")]
        if max(saved, default=0) >= step:
            return children_of(process.pid)
        assert process.poll() is None, "the process ended before"
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no checkpoint of step {step} within three minutes")
