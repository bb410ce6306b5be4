"""The cache with real processes: one builds, the others wait, and a kill leaves nothing wrong."""

import errno
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshtrain.data import cache
from meshtrain.data.cache import Cache
from meshtrain.errors import DataError, ModelError, UserError
from tests.data.corpora import without_privileges

# A fork would inherit broken threads of tokenizers.
context = multiprocessing.get_context("spawn")


def fill_slowly(directory: Path) -> None:
    (directory / "half").write_text("first")
    time.sleep(0.4)
    (directory / "whole").write_text(str(os.getpid()))


def fill_and_fail(directory: Path) -> None:
    time.sleep(0.8)
    fail(directory)


def fail(directory: Path) -> None:
    with (directory.parent / "attempts").open("a") as attempts:
        attempts.write("x")
    raise ModelError(["a.jsonl, line 3: not JSON", "b.txt: empty"])


def fill_for_ever(directory: Path) -> None:
    (directory / "half").write_text("first")
    time.sleep(60)


def fill_a_lot(directory: Path) -> None:
    (directory / "large").write_bytes(bytes(1 << 20))


def build(place: Path, fill: Callable[[Path], None], leads: bool, start: Any, answers: Any) -> None:
    start.wait()
    begin = time.monotonic()
    try:
        answer: Any = Cache(place, leads=leads).build("thing", fill)
    except UserError as error:
        answer = type(error), error.lines
    answers.put((os.getpid(), answer, time.monotonic() - begin))


class Builders:
    """Start processes that build at the same moment."""

    def __init__(self, place: Path, fill: Callable[[Path], None], leads: list[bool]) -> None:
        self.answers = context.Queue()
        start = context.Barrier(len(leads) + 1)
        self.processes = [
            context.Process(target=build, args=(place, fill, lead, start, self.answers)) for lead in leads
        ]
        for process in self.processes:
            process.start()
        start.wait(30)

    def results(self) -> list[tuple[int, Any, float]]:
        results = [self.answers.get(timeout=30) for _ in self.processes]
        for process in self.processes:
            process.join(30)
        return results


def wait_until(happened: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_directory_is_built_once(tmp_path):
    cache = Cache(tmp_path / "new/cache")

    assert cache.build("some/thing", fill_slowly)
    assert not cache.build("some/thing", fill_and_fail)
    assert names_in(cache.directory / "some/thing") == {"half", "whole"}


def test_incomplete_directory_is_built_again(tmp_path):
    cache = Cache(tmp_path)
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing/rubbish").touch()

    assert cache.build("thing", fill_slowly, is_complete=lambda directory: (directory / "whole").exists())
    assert names_in(tmp_path / "thing") == {"half", "whole"}


def test_one_of_many_processes_builds_and_the_leader_goes_first(tmp_path):
    builders = Builders(tmp_path, fill_slowly, leads=[False, False, True, False])

    results = builders.results()

    assert [answer for _, answer, _ in results] == [True] * 4
    assert int((tmp_path / "thing/whole").read_text()) == builders.processes[2].pid


def test_followers_do_not_wait_for_a_leader_on_another_machine(tmp_path):
    begin = time.monotonic()

    assert Cache(tmp_path, leads=False).build("thing", fill_slowly)
    assert time.monotonic() - begin < 10


def test_all_processes_fail_at_once_with_the_same_error_when_the_builder_fails(tmp_path):
    results = Builders(tmp_path, fill_and_fail, leads=[True, False, False]).results()

    assert [answer for _, answer, _ in results] == [(ModelError, ("a.jsonl, line 3: not JSON", "b.txt: empty"))] * 3
    assert (tmp_path / "attempts").read_text() == "x"
    assert "thing" not in names_in(tmp_path)


def test_next_attempt_after_a_failure_builds_again(tmp_path):
    cache = Cache(tmp_path)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"a\.jsonl, line 3: not JSON\nb\.txt: empty"):
            cache.build("thing", fail)

    assert cache.build("thing", fill_slowly)
    assert "thing.failed" not in names_in(tmp_path)


def test_next_process_takes_over_from_a_killed_builder(tmp_path):
    killed = Builders(tmp_path, fill_for_ever, leads=[True])
    wait_until(lambda: (tmp_path / "thing.partial/half").exists())
    waiting = Builders(tmp_path, fill_slowly, leads=[True])
    time.sleep(0.2)
    assert "thing" not in names_in(tmp_path)

    os.kill(killed.processes[0].pid, signal.SIGKILL)

    ((_, answer, _),) = waiting.results()
    assert answer is True
    assert names_in(tmp_path / "thing") == {"half", "whole"}
    assert names_in(tmp_path) == {"thing", "thing.lock"}


def build_with_little_room(place: Path, answers: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    start = context.Barrier(1)
    build(place, fill_a_lot, True, start, answers)  # noqa: FBT003


def test_full_disk_is_reported(tmp_path):
    answers = context.Queue()
    process = context.Process(target=build_with_little_room, args=(tmp_path, answers))
    process.start()

    _, (_, problems), _ = answers.get(timeout=30)
    process.join(30)

    assert problems == (
        f"cannot write {tmp_path}/thing: File too large; make room, or set data.cache_directory to another directory",
    )
    assert not {"thing", "thing.partial"} & names_in(tmp_path)


def test_note_of_a_failure_that_cannot_be_written_hides_nothing(tmp_path, monkeypatch):
    def write(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    # Only a disk that stays full lets both writes fail, and the kernel has no limit for a file that
    # is this small.
    monkeypatch.setattr(cache, "write_atomically", write)
    with pytest.raises(ModelError, match=r"^a\.jsonl, line 3: not JSON"):
        Cache(tmp_path, leads=True).build("thing", fail)
    assert names_in(tmp_path) == {"attempts", "thing.lock"}


def test_unwritable_cache_is_reported(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(DataError) as caught:
        Cache(tmp_path / "file/cache").build("thing", fill_slowly)

    assert str(caught.value) == (
        f"cannot use {tmp_path}/file/cache/thing.lock: Not a directory; "
        "set data.cache_directory to a directory that this user can write and whose file system has locks"
    )


def test_inaccessible_cache_is_reported():
    with without_privileges(), tempfile.TemporaryDirectory() as directory:
        closed = Path(directory, "closed")
        closed.mkdir(mode=0o000)

        with pytest.raises(
            DataError, match=f"cannot use {closed}/cache/thing: Permission denied; set data.cache_direc"
        ):
            Cache(closed / "cache").build("thing", fill_slowly)


def test_read_only_cache_suffices_when_it_is_complete():
    with without_privileges(), tempfile.TemporaryDirectory() as directory:
        cache = Cache(Path(directory))
        cache.build("thing", fill_slowly)
        Path(directory).chmod(0o500)

        assert not cache.build("thing", fill_and_fail)
        with pytest.raises(DataError, match=f"cannot use {directory}/other.lock: Permission denied"):
            cache.build("other", fill_slowly)
        Path(directory).chmod(0o700)
