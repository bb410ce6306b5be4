"""Whether processes live, and processes that end with the one that started them, even if it is killed.

A process that outlives its parent would write beside its successor.
"""

import ctypes
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from meshtrain import console
from meshtrain.runtime.environment import is_under_torchrun
from meshtrain.runtime.failure import PEER_FAILED

PR_SET_PDEATHSIG = 1
PARENT_POLL_SECONDS = 0.5
SECONDS_TO_LEAVE = 3.0
"""A process without its parent has so long to say so and to release its locks."""
_children_die = False
_last_acts: list[Callable[[], None]] = []


@cache
def machine() -> str | None:
    """Return what tells process numbers of this machine from others: its boot and its PID namespace.

    Host names are no help: containers on one machine may share one, and so may two machines. None without /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def started_at(pid: int) -> str | None:
    """Return when a process of this machine was started, in the kernel's ticks; None if it has ended.

    With the number of the process it tells it from a later one of the same number. None without /proc, too.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name of the program stands in brackets, and may hold anything.
    state, *fields = status.rpartition(") ")[2].split()
    return None if state in "ZX" else fields[18]


def is_hidden(pid: int) -> bool:
    """Whether a process lives that /proc does not show to this user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False


def before_sudden_end(act: Callable[[], None]) -> None:
    """Have something called before this process ends itself without unwinding, as the guard does."""
    if act not in _last_acts:
        _last_acts.append(act)


def do_last_acts() -> None:
    """Call what `before_sudden_end` was given."""
    for act in _last_acts:
        act()


@cache
def end_with_torchrun() -> None:
    """End this process soon after the torchrun that started it, if one did.

    torchrun kills its workers when it ends by itself; when it is killed, they would go on, and meet those of the next
    start. A thread watches the number of the parent. The kernel's signal for the purpose (PR_SET_PDEATHSIG) would come
    as soon as the thread ends that started this process, and torchrun may have started it from any.
    """
    if is_under_torchrun():
        threading.Thread(target=_watch_parent, args=(os.getppid(),), name="parent", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    # Standard error may be a pipe that nobody reads, and a file system may hang.
    threading.Timer(SECONDS_TO_LEAVE, os._exit, [PEER_FAILED]).start()
    try:
        do_last_acts()
        console.stop_lines([f"torchrun (process {parent}), which started it, was killed"])
    finally:
        os._exit(PEER_FAILED)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Linux only; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@cache
def hold_until_death(path: Path) -> int:
    """Hold a lock file, with others, as long as this process lives; return its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def wait_for_holders(path: Path) -> None:
    """Wait until every process that holds a lock file is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def children_die_with_parent() -> Iterator[None]:
    """Let processes that are forked meanwhile end with this one."""
    global _children_die
    _watch_forks()
    _children_die = True
    try:
        yield
    finally:
        _children_die = False


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_die_if_wanted)


def _die_if_wanted() -> None:
    if _children_die:
        die_with_parent()
