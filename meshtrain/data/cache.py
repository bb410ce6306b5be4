"""The cache: directories that one process builds once. Each is complete, or it is missing."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from meshtrain import errors
from meshtrain.errors import DataError, UserError
from meshtrain.runtime.disk import flush, flush_tree
from meshtrain.runtime.lock import locked

FOLLOWER_TIMEOUT_SECONDS = 2.0
FOLLOWER_POLL_SECONDS = 0.01


def compute_identity(*what: object) -> str:
    """Return a hash of `what`, which is anything that JSON can hold."""
    return xxh3_128_hexdigest(json.dumps(what).encode())


@dataclass(frozen=True)
class Cache:
    """A directory that the processes of many runs share."""

    directory: Path
    leads: bool = True
    """Whether this process goes first if several ask at once.

    It is the one that shows its progress bar.
    """

    def build(
        self,
        name: str,
        fill: Callable[[Path], None],
        *,
        is_complete: Callable[[Path], bool] = Path.is_dir,
        keeps_partial: bool = False,
    ) -> bool:
        """Build the directory `name`, unless it is complete.

        Of all processes that ask at once, one builds it.

        It is built in a temporary directory, flushed to disk, and renamed. So a process that is
        killed never leaves a directory that looks complete. The next process that builds removes
        what it left, or continues it. The other processes wait. If building fails, they fail at
        once with the same error.

        Args:
            name: relative to the cache.
            fill: fills the directory that it receives, which is new and empty unless
                `keeps_partial`.
            is_complete: whether a directory is complete; if it is not, it is built again.
            keeps_partial: `fill` continues what a killed process left, and checks what of it is
                valid.

        Returns:
            Whether it was built since this process asked, by this process or another.

        Raises:
            UserError: what `fill` raised in this process, or in the process that this one waited
                for. A DataError if the cache cannot be written.
        """
        directory = self.directory / name
        note = directory.with_name(f"{directory.name}.failed")
        with report_os_errors(directory):
            if is_complete(directory):
                return False
            note_before = file_version(note)

        def has_failed() -> bool:
            return file_version(note) != note_before

        with self.exclusive(f"{name}.lock", is_done=lambda: is_complete(directory) or has_failed()):
            if is_complete(directory):
                return True
            if has_failed():
                # The process that this one waited for has failed. Another attempt would fail too,
                # one rank after another.
                kind, lines = json.loads(note.read_text())
                raise getattr(errors, kind)(lines)
            try:
                build_directory(directory, fill, keeps=(OSError, KeyboardInterrupt) if keeps_partial else ())
            except UserError as error:
                # Without the note, the other ranks try for themselves. The disk may be full.
                with suppress(OSError):
                    write_atomically(note, json.dumps([type(error).__name__, error.lines]))
                raise
            note.unlink(missing_ok=True)
        return True

    @contextmanager
    def exclusive(self, name: str, *, is_done: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock file `name`.

        Wait until no other process holds it; a process that dies releases it.

        Args:
            is_done: whether another process has done the work. A process that does not lead waits a
                moment for the leader to take the lock.

        Raises:
            DataError: if the cache cannot be written or its file system has no locks.
        """
        path = self.directory / name
        with report_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with report_os_errors(path):
                if not self.leads:
                    _wait_for_leader(descriptor, is_done)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


@contextmanager
def report_os_errors(path: Path) -> Iterator[None]:
    """Raise a DataError for an OSError at `path` in the cache."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot use {path}: {error.strerror}",
            "set data.cache_directory to a directory that this user can write and whose file system has locks",
        ) from error


def _wait_for_leader(descriptor: int, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + FOLLOWER_TIMEOUT_SECONDS
    while not is_done() and time.monotonic() < deadline:
        try:
            # The lock is shared, so that two followers that poll at once do not take each other for
            # the leader.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(FOLLOWER_POLL_SECONDS)


def build_directory(
    directory: Path,
    fill: Callable[[Path], None],
    *,
    keeps: tuple[type[BaseException], ...] = (),
    advice: str = "set data.cache_directory to another directory",
) -> None:
    """Fill a temporary directory, flush it to disk and rename it; see `Cache.build`.

    Args:
        keeps: exceptions of `fill` after which the temporary directory stays. If there are any,
            `fill` receives the temporary directory of the last attempt.
        advice: how to write elsewhere, for the message that the directory cannot be written.

    Raises:
        UserError: what `fill` raised; a DataError if the directory cannot be written.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    is_kept = False
    try:
        shutil.rmtree(directory, ignore_errors=True)
        if not keeps:
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        fill(partial)
        flush_tree(partial)
        partial.rename(directory)
        flush(directory.parent)
    except BaseException as error:
        is_kept = isinstance(error, keeps)
        if isinstance(error, OSError):
            raise DataError(f"cannot write {directory}: {error.strerror}", f"make room, or {advice}") from error
        raise
    finally:
        if not is_kept:
            shutil.rmtree(partial, ignore_errors=True)


def build_output(output: Path, fill: Callable[[Path], None], *, keeps: tuple[type[BaseException], ...] = ()) -> bool:
    """Build the directory that --output names, as `build_directory` does, under a lock.

    Returns:
        Whether it was built; False if another process had built it since the caller checked.

    Raises:
        UserError: what `build_directory` raises; a DataError if another process is building it.
    """
    advice = "choose another --output"
    with locked(output, f"--output {output}", advice, DataError):
        if output.exists():
            return False
        build_directory(output, fill, keeps=keeps, advice=advice)
    return True


def write_atomically(path: Path, text: str) -> None:
    """Replace the file `path` by one that holds `text`.

    Readers see either the old file or the new one.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        partial.write_text(text)
        flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def file_version(path: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever `path` is replaced; None if there is no such file."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns
