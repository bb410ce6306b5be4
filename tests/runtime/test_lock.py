"""One process at a time: real processes and real kills here, other machines by the files that they would write."""

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
from meshtrain.runtime.claims import MARK, Location, list_claims
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
    """Let a heartbeat take a tenth of a second."""
    for name, seconds in (("BEAT", 0.1), ("SAME_JOB", 0.6), ("LEASE", 1.2), ("POLL", 0.02)):
        monkeypatch.setattr(lock, f"{name}_SECONDS", seconds)


@pytest.fixture(params=["new", "there", "memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """Return a folder that is to be locked."""
    if request.param == "there":
        (tmp_path / "out").mkdir()
    if request.param == "memory":
        return UPath(f"memory://{tmp_path}/out")
    return UPath(f"file://{tmp_path}/out") if request.param == "file" else tmp_path / "out"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a folder of this machine."""
    return tmp_path / "out"


def hold(folder: Location) -> Any:
    """Return the lock of a folder, to be entered."""
    return locked(folder, "out", "choose another", ConfigError)


def refusal(folder: Location) -> str:
    """Return what is said when the lock cannot be taken."""
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
    """Write what another process would write."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{MARK}{token}"
    path.write_bytes(content_of(holder, holds=holds, beat=beat))
    return path


def elsewhere(**changes: Any) -> Holder:
    """Return a process of another machine."""
    return replace(this_process(), host="far", pid=7, started="1", machine="another boot", since="noon", **changes)


def test_the_second_is_refused_with_who_holds_it(folder: Location) -> None:
    with hold(folder):
        here = this_process()
        said = refusal(folder)
        assert said.startswith(f"out is in use by process {here.pid} on {here.host}, since 20")
        assert said.endswith("; wait until it ends, end it, or choose another")
        assert len(list_claims(folder)) == 1
    assert list_claims(folder) == []
    with hold(folder):
        pass


def test_nothing_is_left(out: Path) -> None:
    with hold(out / "deep" / "deeper"):
        assert [path.name.partition("-")[0] for path in (out / "deep").iterdir()] == [".deeper.lock"]
    assert not out.exists()
    out.mkdir()
    with hold(out):
        assert [path.name.partition("-")[0] for path in out.iterdir()] == [".lock"]
    assert list(out.iterdir()) == []


def test_a_folder_that_appears_meanwhile_stays_locked(out: Path) -> None:
    with hold(out):
        out.mkdir()
        assert "in use" in refusal(out)
        (out.parent / "link").symlink_to(out)
        assert "in use" in refusal(out.parent / "link")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_killed_holder_gives_way_at_once(out: Path, scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = UPath(f"{scheme}{out}") if scheme else out
    with other_process(where) as process:
        assert f"process {process.pid} on " in refusal(where)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        assert f"process {process.pid} on " in refusal(where)
        process.kill()
        # Not waited for: it is a zombie now.
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)
        with hold(where):
            assert len(list_claims(where)) == 1
        assert capsys.readouterr().out == ""


def test_another_process_with_the_number_of_a_dead_one_is_not_the_holder(out: Path) -> None:
    here = this_process()
    claim = write_claim(out, replace(here, started=str(int(here.started) - 1)))
    with hold(out):
        assert not claim.exists()


def test_a_process_of_another_user_that_proc_hides_may_live(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "is_hidden", lambda pid: pid == 99)
    monkeypatch.setattr(lock, "started_at", lambda pid: None if pid == 99 else "5")
    write_claim(out, replace(this_process(), pid=99))
    begin = time.monotonic()
    with hold(out):
        assert time.monotonic() - begin >= 1.2


@contextmanager
def beating(folder: Path, holder: Holder) -> Iterator[None]:
    """Renew the lock of another machine."""
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


def test_a_live_holder_on_another_machine_is_found_by_its_heartbeat(out: Path) -> None:
    begin = time.monotonic()
    with beating(out, elsewhere()):
        assert refusal(out) == (
            "out is in use by process 7 on far, since noon; wait until it ends, end it, or choose another"
        )
    assert time.monotonic() - begin < 1.0


def test_a_dead_holder_on_another_machine_is_outwaited(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same job for a shorter time; after Slurm has put the job back into its queue not at all, and silently."""
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
        f"out: {far}, since noon, may still write there; waiting for it to renew its lock, 1 s at most",
        f"out: {far} of Slurm job 6, since noon, may still write there; waiting for it to renew its lock, 1 s at most",
        f"out: {far} of Slurm job 5, since noon, may still write there; waiting for it to renew its lock, 1 s at most",
    ]


def test_a_file_that_says_nothing_counts_as_long_as_it_changes(out: Path) -> None:
    write_claim(out, elsewhere()).write_bytes(b"")
    begin = time.monotonic()
    with hold(out):
        assert time.monotonic() - begin >= 1.2


def test_of_many_that_come_at_once_one_gets_it(folder: Location) -> None:
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
    assert all("in use by process" in said for said in refused)
    held[0].release()


def test_who_stood_still_too_long_has_lost_it(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold(folder) as mine:
        assert mine.check() is None
        # As another machine sees a holder that does nothing.
        mine._is_over.set()
        monkeypatch.setattr(lock, "machine", lambda: "another boot")
        monkeypatch.setattr(lock.socket, "gethostname", lambda: "far")
        with hold(folder):
            said = mine.check()
            assert said is not None
            assert said.startswith(f"out was taken over by process {os.getpid()} on far, since ")
            assert said == mine.loss()


def test_who_goes_on_after_that_finds_its_file_gone(folder: Location) -> None:
    with hold(folder) as mine:
        for claim in list_claims(folder):
            claim.unlink()
        time.sleep(0.5)
        assert mine.loss() is not None
        assert list_claims(folder) == []


def test_a_place_that_cannot_be_written_is_said_in_a_line(out: Path) -> None:
    out.write_text("a file")
    assert refusal(out / "deep") == "out: cannot write its lock: Not a directory; make room, or choose another"


def test_a_lock_without_a_beat_is_renewed_in_place(out: Path) -> None:
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
