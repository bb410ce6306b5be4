"""A process of a run, from start to end."""

import faulthandler
import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshtrain.errors import ConfigError
from meshtrain.runtime import process
from meshtrain.runtime.activity import HangLimits
from meshtrain.runtime.process import check_devices, join_for_script, lift_timeouts, process_group, run_process
from tests.ranks import run_on_ranks


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    check_devices()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    check_devices()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        check_devices()
    assert caught.value.lines == (
        "3 processes are started on this machine, which has 2 GPUs; start at most as many, or set "
        "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU",
    )


def timeouts(directory: Path) -> tuple[int, int, set[timedelta]]:
    with run_process(directory, HangLimits(60.0, 60.0, 10.0)) as process:
        group = dist.new_group([0, 1])
        lift_timeouts()
        backends = [each._get_backend(torch.device("cpu")) for each in (dist.group.WORLD, group)]
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend.
        unwrapped = [getattr(backend, "wrapped_pg", backend) for backend in backends]
        return process.rank, process.world_size, {backend.options._timeout for backend in unwrapped}


def test_torch_timeouts_are_longer_than_those_of_the_guard(tmp_path: Path) -> None:
    """Every process group has a timeout far above the limits of the guard."""
    day = {timedelta(days=1)}
    assert run_on_ranks(2, timeouts, tmp_path, joins=False) == [(0, 2, day), (1, 2, day)]
    assert list(tmp_path.iterdir()) == []


def train_twice(directory: Path) -> list[bool]:
    """Set a key in both stores of a run; return whether the next start finds it."""
    found = []
    for _ in range(2):
        with run_process(directory, HangLimits(60.0, 60.0, 10.0)) as here:
            dist.barrier()
            stores = [dist.distributed_c10d._get_default_store(), here.guard._store]
            found += [store.check(["left"]) for store in stores]
            dist.barrier()
            for store in stores:
                store.set("left", "here")
    return found


def test_second_training_of_a_program_has_empty_stores(tmp_path: Path) -> None:
    assert run_on_ranks(2, train_twice, tmp_path, joins=False) == [[False] * 4] * 2


Settings = tuple[str | None, str | None, bool]


def settings() -> Settings:
    return os.environ.get("TORCH_FR_BUFFER_SIZE"), os.environ.get("GLOO_SOCKET_IFNAME"), faulthandler.is_enabled()


def choose_loopback(*_: object) -> None:
    """Do as `check_hosts` does on several machines."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def join_and_leave(directory: Path, environment: dict[str, str]) -> list[Settings]:
    """Return the settings before, inside and after each way to join a process group."""
    faulthandler.disable()
    os.environ.update(environment)
    process.check_hosts = choose_loopback
    found = [settings()]
    with run_process(directory, HangLimits(60.0, 60.0, 10.0)):
        found.append(settings())
    found.append(settings())
    with process_group():
        found.append(settings())
    found.append(settings())
    with pytest.raises(ValueError, match="of the program"), run_process(directory, HangLimits(60.0, 60.0, 10.0)):
        raise ValueError("of the program")
    found.append(settings())
    return found


def test_a_program_has_its_settings_again_after_a_run(tmp_path: Path) -> None:
    before: Settings = (None, None, False)
    (found,) = run_on_ranks(1, join_and_leave, tmp_path, {}, joins=False)
    assert found == [before, ("2000", "lo", True), before, (None, "lo", True), before, before]
    own = {"TORCH_FR_BUFFER_SIZE": "10", "GLOO_SOCKET_IFNAME": "lo"}
    (found,) = run_on_ranks(1, join_and_leave, tmp_path, own, joins=False)
    assert set(found) == {("10", "lo", False), ("10", "lo", True)}
    assert found[2] == found[4] == found[5] == found[0]


CRASH = """
import os
from meshtrain.runtime.process import join_for_script

def crash():
    os.abort()

join_for_script()
crash()
"""
OWN_FILE = "import faulthandler; faulthandler.enable(open('stacks', 'w'))"


def test_crashed_process_writes_its_python_stack(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in ended.stderr
    assert "in crash" in ended.stderr
    # If the program has enabled stacks elsewhere, they are written there.
    ended = subprocess.run([sys.executable, "-c", OWN_FILE + CRASH], cwd=tmp_path, capture_output=True, text=True)
    assert "in crash" in (tmp_path / "stacks").read_text()
    assert "in crash" not in ended.stderr


def test_process_without_stderr_joins() -> None:
    code = "from meshtrain.runtime.process import join_for_script; join_for_script(); print('joined')"
    ended = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (0, b"joined\n")


def leave_early() -> str:
    join_for_script()
    message = io.StringIO()
    if dist.get_rank() == 0:
        process.LEAVE_SECONDS = 0.1
        with redirect_stderr(message):
            process._leave_at_exit()
    return message.getvalue()


def test_program_that_ends_on_one_rank_alone_prints_a_message() -> None:
    message, nothing = run_on_ranks(2, leave_early, joins=False)
    assert nothing == ""
    assert message == (
        "rank 0 has finished, but 1 other rank has not finished within 0 s. Rank 0 leaves, so its next collective "
        "will fail\n"
    )
