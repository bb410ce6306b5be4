"""A lock with which one process at a time writes into a folder, across machines.

It also works over NFS and in object stores. A process writes a file of its own into the folder (see
`meshtrain.runtime.claims`), then lists the files of others. Of two processes that come at different
times, the later one finds the file of the earlier one and is refused. Two that come at once may
both find each other; then the one with the larger token is refused.

The file names the process, and is renewed every BEAT_SECONDS. A process that was killed leaves its
file behind:
- On this machine, a process is dead if no process has its number and its start time.
- On another machine, it is dead if its file does not change for LEASE_SECONDS, or for
  SAME_JOB_SECONDS if it belongs to the job of this process. Time is measured by this process, so
  the clocks of two machines need not agree.
- A process of the same Slurm job from before it was put back into the queue is dead at once.

A process may be suspended for so long that another one takes its lock. When it resumes, it finds
that its file is gone.

The token cache has another kind of lock, flock: there all ranks of all runs wait for the one that
builds.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from meshtrain import console
from meshtrain.errors import Problem, UserError, reason_of
from meshtrain.runtime.claims import ClaimFile, list_claims, read_claim, remove_claim, renew_claim, token_of
from meshtrain.runtime.environment import job_from_environment, requeues_from_environment
from meshtrain.runtime.lifetime import at_sudden_exit, is_hidden, machine, started_at
from meshtrain.runtime.location import Location, errors_of

BEAT_SECONDS = 5.0
"""Interval at which a holder renews its file."""
SAME_JOB_SECONDS = 15.0
LEASE_SECONDS = 60.0
POLL_SECONDS = 0.5
"""Interval at which a process polls while it does not know whether another one is alive."""

_locks: "set[Lock]" = set()


@dataclass(frozen=True)
class Holder:
    """A process that holds or requests a lock, as it describes itself.

    Attributes:
        host: its hostname.
        pid: its process number there.
        started: when it was started, in the kernel's ticks; None if unknown.
        machine: identifies the machine to which the process number belongs; None if unknown.
        job: name of its job, which stays the same over restarts; None if there is none.
        requeues: how often Slurm had put that job back into its queue.
        since: when it requested the lock, by its own clock. It is shown, never compared.
    """

    host: str
    pid: int
    started: str | None
    machine: str | None
    job: str | None
    requeues: int
    since: str

    def described(self) -> str:
        """Return the description of the process for a message."""
        job = f" of {self.job}" if self.job is not None else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


def this_process() -> Holder:
    """Return the description of this process."""
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=started_at(os.getpid()),
        machine=machine(),
        job=job_from_environment(),
        requeues=requeues_from_environment(),
        since=datetime.now().astimezone().isoformat(" ", "seconds"),
    )


def content_of(holder: Holder, *, holds: bool, beat: int) -> bytes:
    """Return the content of a process's file. Its length stays the same for one process."""
    return json.dumps({**asdict(holder), "holds": int(holds), "beat": f"{beat:012}"}, indent=1).encode()


def _read(content: bytes) -> tuple[Holder | None, bool]:
    """Return the process that wrote a file, and whether it has the lock already.

    The process is None while it is still writing the file.
    """
    try:
        values = json.loads(content)
        holds = bool(values.pop("holds"))
        values.pop("beat")
        return Holder(**values), holds
    except (ValueError, KeyError, TypeError):
        return None, True


@dataclass
class _FirstReading:
    """The first content that was read from another process's file, and when it was read."""

    content: bytes
    time: float


@contextmanager
def locked(folder: Location, what: str, advice: str, kind: type[UserError]) -> Iterator["Lock"]:
    """Hold the lock of a folder, which need not exist, while the block runs.

    Args:
        folder: no other process may write into it.
        what: names the folder in messages, as the user does: "run_directory = out".
        advice: what to do if another process holds the lock: "choose another run_directory".
        kind: of the error.

    Raises:
        kind: if another process holds the lock, or the lock cannot be written.
    """
    lock = Lock(folder, what, advice, kind)
    lock.acquire()
    try:
        yield lock
    finally:
        lock.release()


class Lock:
    """The lock of a folder, see `locked`."""

    def __init__(self, folder: Location, what: str, advice: str, kind: type[UserError]) -> None:
        self._folder = folder.resolve() if isinstance(folder, Path) else folder
        self._what, self._advice, self._kind = what, advice, kind
        self._errors = errors_of(folder)
        self._holder, self._token = this_process(), secrets.token_hex(8)
        self._file: ClaimFile | None = None
        self._holds, self._beat, self._is_lost = False, 0, False
        self._removed: list[Location] = []
        self._writing, self._is_over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock. It can be called once.

        Raises:
            UserError: of the requested kind, if another process holds the lock or it cannot be
                written.
        """
        try:
            content = content_of(self._holder, holds=False, beat=0)
            self._file = ClaimFile(self._folder, self._token, content)
            self._thread = threading.Thread(target=self._renew, args=(self._file,), name="lock", daemon=True)
            self._thread.start()
            _locks.add(self)
            at_sudden_exit(release_all)
            self._wait_for_others()
            self._holds = True
            self._write(self._file)
        except self._errors as error:
            self.release()
            if isinstance(error, UserError):
                raise
            raise self._kind(
                f"{self._what}: cannot write its lock: {reason_of(error)}", f"make room, or {self._advice}"
            ) from error
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock. Do nothing if it is not held."""
        _locks.discard(self)
        self._is_over.set()
        file, self._file = self._file, None
        if file is None:
            return
        if self._thread is not None:
            # Without this, a write of the thread could create the file again after it is removed.
            self._thread.join(BEAT_SECONDS)
        try:
            file.remove()
        except self._errors as error:
            console.warning(
                f"cannot remove {file.path}: {reason_of(error)}; other machines will treat {self._what} as in use "
                f"for another {LEASE_SECONDS:.0f} s"
            )

    def loss(self) -> Problem | None:
        """Return why this process may no longer write, or None if it may."""
        if not self._is_lost:
            return None
        holders = [_read(content)[0] for content in self._others().values()]
        taker = next((f" by {holder.described()}" for holder in holders if holder is not None), "")
        return Problem(
            f"{self._what} was taken over{taker}: this process, its disk or its network was suspended for more "
            f"than {SAME_JOB_SECONDS:.0f} s; it stops, so that the other one can continue"
        )

    def check(self) -> Problem | None:
        """Check whether this process still holds the lock. Return why not, or None if it does."""
        assert self._file is not None
        try:
            self._is_lost = self._is_lost or read_claim(self._file.path) is None
        except self._errors as error:
            found = f"{self._what}: cannot read its lock {self._file.path}: {reason_of(error)}"
            return Problem(found, "fix it, then resume")
        return self.loss()

    def _others(self) -> dict[Location, bytes]:
        contents = {claim: read_claim(claim) for claim in list_claims(self._folder) if token_of(claim) != self._token}
        return {claim: content for claim, content in contents.items() if content is not None}

    def _wait_for_others(self) -> None:
        readings: dict[Location, _FirstReading] = {}
        has_warned = False
        while others := self._others():
            for claim, content in others.items():
                holder, holds = _read(content)
                first = readings.setdefault(claim, _FirstReading(content, time.monotonic()))
                is_alive = self._is_alive(holder, first, content)
                if is_alive is False:
                    remove_claim(claim)
                    self._removed.append(claim)
                    break
                seconds = time.monotonic() - first.time
                # Of two processes without the lock, the one with the larger token is refused. If
                # that one is suspended and does not withdraw in time, this one is refused.
                if is_alive and (holds or token_of(claim) < self._token or seconds >= SAME_JOB_SECONDS):
                    raise self._kind(
                        f"{self._what} is in use by {_described(holder)}",
                        f"wait until it ends, end it, or {self._advice}",
                    )
                if is_alive is None and seconds >= POLL_SECONDS and not has_warned:
                    has_warned = True
                    console.line(
                        f"{self._what} may still be in use by {_described(holder)}; waiting up to "
                        f"{self._timeout(holder):.0f} s for it to renew its lock"
                    )
            else:
                time.sleep(POLL_SECONDS)

    def _is_alive(self, holder: Holder | None, first: _FirstReading, content: bytes) -> bool | None:
        """Return whether another process is alive, or None if that is not known yet."""
        if holder is not None:
            here = self._holder.machine is not None and holder.machine == self._holder.machine
            if here and not (started_at(holder.pid) is None and is_hidden(holder.pid)):
                return holder.started is not None and started_at(holder.pid) == holder.started
            if self._is_same_job(holder) and holder.requeues < self._holder.requeues:
                return False
        if content != first.content:
            return True
        return False if time.monotonic() - first.time >= self._timeout(holder) else None

    def _is_same_job(self, holder: Holder | None) -> bool:
        return holder is not None and holder.job is not None and holder.job == self._holder.job

    def _timeout(self, holder: Holder | None) -> float:
        return SAME_JOB_SECONDS if self._is_same_job(holder) else LEASE_SECONDS

    def _write(self, file: ClaimFile) -> None:
        with self._writing:
            self._beat += 1
            renew_claim(file.path, content_of(self._holder, holds=self._holds, beat=self._beat))

    def _renew(self, file: ClaimFile) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            try:
                self._write(file)
                # An object store has no write that fails if the file is gone, so a removed file may
                # have come back.
                for claim in self._removed:
                    remove_claim(claim)
            except FileNotFoundError:
                self._is_lost = True
                return
            except self._errors:
                # The next beat tries again. If none succeeds, another process takes over, and
                # `check` finds that.
                continue


def _described(holder: Holder | None) -> str:
    return holder.described() if holder is not None else "an unknown process"


def release_all() -> None:
    """Release all locks of this process, before it ends without unwinding."""
    for lock in list(_locks):
        lock.release()
