"""A folder is locked by one process at a time; with real processes, kills and lock files."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from meshtrain.errors import ConfigError
from meshtrain.runtime import lock
from meshtrain.runtime.claims import MARK, list_claims
from meshtrain.runtime.location import Location
from meshtrain.runtime.lock import Holder, Lock, content_of, locked, this_process

HOLD = """
import sys, time
from pathlib import Path
from upath import UPath
from meshtrain.errors import ConfigError
from meshtrain.runtime.lock import locked

folder = UPath(sys.argv[1]) if "://" in sys.argv[1] else Path(sys.argv[1])
try:
    with locked(folder, "out", "choose another", ConfigError):
        print("held", flush=True)
        sys.stdin.readline()
except ConfigError as error:
    print(error, flush=True)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a heartbeat of a tenth of a second."""
    for name, seconds in (("BEAT", 0.1), ("SAME_JOB", 0.6), ("LEASE", 1.2), ("POLL", 0.02)):
        monkeypatch.setattr(lock, f"{name}_SECONDS", seconds)


@pytest.fixture(params=["new", "there", "memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """Return a folder to lock, as a path or behind a URL."""
    if request.param == "there":
        (tmp_path / "out").mkdir()
    if request.param == "memory":
        return UPath(f"memory://{tmp_path}/out")
    return UPath(f"file://{tmp_path}/out") if request.param == "file" else tmp_path / "out"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a folder on this machine."""
    return tmp_path / "out"


def hold(folder: Location) -> Any:
    """Return the unentered lock of a folder."""
    return locked(folder, "out", "choose another", ConfigError)


def refusal(folder: Location) -> str:
    """Return the message if the lock cannot be taken."""
    with pytest.raises(ConfigError) as caught, hold(folder):
        pass
    (problem,) = caught.value.lines
    return problem


@contextmanager
def other_process(folder: Location | str) -> Iterator[subprocess.Popen]:
    """Let another process hold the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def write_claim(folder: Path, holder: Holder, *, beat: int = 1, holds: bool = True, token: str = "0") -> Path:
    """Write the lock file of another process."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{MARK}{token}"
    path.write_bytes(content_of(holder, holds=holds, beat=beat))
    return path


def elsewhere(**changes: Any) -> Holder:
    """Return a process of another machine."""
    return replace(this_process(), host="far", pid=7, started="1", machine="another boot", since="noon", **changes)


def test_second_process_is_refused_and_the_holder_is_named(folder: Location) -> None:
    with hold(folder):
        here = this_process()
        message = refusal(folder)
        assert message.startswith(f"out is in use by process {here.pid} on {here.host}, since 20")
        assert message.endswith("; wait until it ends, end it, or choose another")
        assert len(list_claims(folder)) == 1
    assert list_claims(folder) == []
    with hold(folder):
        pass


def test_released_lock_leaves_no_files(out: Path) -> None:
    with hold(out / "deep" / "deeper"):
        assert [path.name.partition("-")[0] for path in (out / "deep").iterdir()] == [".deeper.lock"]
    assert not out.exists()
    out.mkdir()
    with hold(out):
        assert [path.name.partition("-")[0] for path in out.iterdir()] == [".lock"]
    assert list(out.iterdir()) == []


def test_folder_created_while_locked_stays_locked(out: Path) -> None:
    with hold(out):
        out.mkdir()
        assert "in use" in refusal(out)
        (out.parent / "link").symlink_to(out)
        assert "in use" in refusal(out.parent / "link")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_lock_of_a_killed_holder_is_taken_at_once(out: Path, scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = UPath(f"{scheme}{out}") if scheme else out
    with other_process(where) as process:
        assert f"process {process.pid} on " in refusal(where)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        assert f"process {process.pid} on " in refusal(where)
        process.kill()
        # The process is not reaped: it is a zombie now.
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)
        with hold(where):
            assert len(list_claims(where)) == 1
        assert capsys.readouterr().out == ""


def test_new_process_with_the_pid_of_a_dead_holder_is_not_the_holder(out: Path) -> None:
    here = this_process()
    claim = write_claim(out, replace(here, started=str(int(here.started) - 1)))
    with hold(out):
        assert not claim.exists()


def test_holder_hidden_by_proc_may_be_alive(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "is_hidden", lambda pid: pid == 99)
    monkeypatch.setattr(lock, "started_at", lambda pid: None if pid == 99 else "5")
    write_claim(out, replace(this_process(), pid=99))
    begin = time.monotonic()
    with hold(out):
        assert time.monotonic() - begin >= 1.2


@contextmanager
def beating(folder: Path, holder: Holder) -> Iterator[None]:
    """Renew the lock like a process of another machine."""
    is_over = threading.Event()
    path = write_claim(folder, holder)

    def beat() -> None:
        number = 1
        while not is_over.wait(0.05):
            number += 1
            path.write_bytes(content_of(holder, holds=True, beat=number))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_live_holder_on_another_machine_is_detected_by_its_heartbeat(out: Path) -> None:
    begin = time.monotonic()
    with beating(out, elsewhere()):
        assert refusal(out) == (
            "out is in use by process 7 on far, since noon; wait until it ends, end it, or choose another"
        )
    assert time.monotonic() - begin < 1.0


def test_lock_of_a_dead_holder_on_another_machine_is_taken_after_a_wait(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is shorter for the same job; a job that Slurm has requeued does not wait."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    found = []
    for job, requeues in ((None, 0), ("Slurm job 6", 0), ("Slurm job 5", 1), ("Slurm job 5", 0)):
        write_claim(out, elsewhere(job=job, requeues=requeues))
        begin = time.monotonic()
        with hold(out):
            found.append(time.monotonic() - begin)
    assert found[0] >= 1.2
    assert found[1] >= 1.2
    assert found[2] >= 0.6
    far = "process 7 on far"
    assert capsys.readouterr().out.splitlines() == [
        f"out may still be in use by {far}, since noon; waiting up to 1 s for it to renew its lock",
        f"out may still be in use by {far} of Slurm job 6, since noon; waiting up to 1 s for it to renew its lock",
        f"out may still be in use by {far} of Slurm job 5, since noon; waiting up to 1 s for it to renew its lock",
    ]


def test_unreadable_lock_file_counts_for_a_time(out: Path) -> None:
    write_claim(out, elsewhere()).write_bytes(b"")
    begin = time.monotonic()
    with hold(out):
        assert time.monotonic() - begin >= 1.2


def test_one_of_many_simultaneous_processes_gets_the_lock(folder: Location) -> None:
    locks = [Lock(folder, "out", "choose another", ConfigError) for _ in range(8)]
    barrier, held, refused = threading.Barrier(len(locks)), [], []

    def come(mine: Lock) -> None:
        barrier.wait()
        try:
            mine.acquire()
            held.append(mine)
        except ConfigError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=come, args=(mine,)) for mine in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1
    assert len(refused) == 7
    assert all("in use by process" in message for message in refused)
    held[0].release()


def test_suspended_holder_loses_the_lock(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold(folder) as mine:
        assert mine.check() is None
        # As another machine sees a holder that does nothing.
        mine._is_over.set()
        monkeypatch.setattr(lock, "machine", lambda: "another boot")
        monkeypatch.setattr(lock.socket, "gethostname", lambda: "far")
        with hold(folder):
            problem = mine.check()
            assert problem is not None
            assert str(problem).startswith(f"out was taken over by process {os.getpid()} on far, since ")
            assert problem == mine.loss()


def test_holder_detects_that_its_lock_file_is_gone(folder: Location) -> None:
    with hold(folder) as mine:
        for claim in list_claims(folder):
            claim.unlink()
        time.sleep(0.5)
        assert mine.loss() is not None
        assert list_claims(folder) == []


def test_unwritable_folder_is_a_one_line_error(out: Path) -> None:
    out.write_text("a file")
    assert refusal(out / "deep") == "out: cannot write its lock: Not a directory; make room, or choose another"


def test_heartbeat_rewrites_the_lock_file_in_place(out: Path) -> None:
    with hold(out):
        (claim,) = list_claims(out)
        seen = set()
        for _ in range(30):
            content = claim.read_bytes()
            assert len(content) > 100
            seen.add(content)
            time.sleep(0.02)
        assert len(seen) > 3
        assert len({len(content) for content in seen}) == 1
