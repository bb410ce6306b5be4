"""Find out whether processes are alive, and end processes with their parent, even if it is killed.

A process that outlives its parent would write to the same files as its successor.
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
from meshtrain.runtime.exit_codes import PEER_FAILED

PR_SET_PDEATHSIG = 1
PARENT_POLL_SECONDS = 0.5
ORPHAN_SECONDS = 3.0
"""Time in which a process without its parent reports that and releases its locks."""
_children_die = False
_forking_process: int | None = None
_exit_functions: list[Callable[[], None]] = []
_torchrun: int | None = None
_ending = threading.Lock()


@cache
def machine() -> str | None:
    """Return an identifier of this machine's boot and PID namespace, or None without /proc.

    Process numbers are unique within them. Host names are not sufficient: containers on one machine
    may share one, and so may two machines.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def started_at(pid: int) -> str | None:
    """Return when a process of this machine was started, in the kernel's ticks.

    Together with the process number, this distinguishes a process from a later one with the same
    number.

    Returns:
        None if the process has ended, if it is hidden from this user, or without /proc.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name of the program is in parentheses and may contain any character.
    state, *fields = status.rpartition(") ")[2].split()
    return None if state in "ZX" else fields[18]


def is_hidden(pid: int) -> bool:
    """Return whether a process is alive that /proc does not show to this user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False


def at_sudden_exit(act: Callable[[], None]) -> None:
    """Register a function to call before this process ends without unwinding, as the guard does."""
    if act not in _exit_functions:
        _exit_functions.append(act)


def run_exit_functions() -> None:
    """Call the functions registered with `at_sudden_exit`."""
    for act in _exit_functions:
        act()


@cache
def end_with_torchrun() -> None:
    """End this process soon after the torchrun that started it, if there is one.

    torchrun kills its workers when it ends by itself. When torchrun is killed, they would continue,
    and run beside those of the next start. A thread polls the number of the parent process. The
    kernel's signal for this purpose (PR_SET_PDEATHSIG) is not used: it is sent as soon as the
    thread ends that started this process, and torchrun may have used any thread.
    """
    global _torchrun
    if is_under_torchrun():
        _torchrun = os.getppid()
        threading.Thread(target=_watch_torchrun, name="parent", daemon=True).start()


def end_if_torchrun_ended() -> None:
    """End this process now if `end_with_torchrun` would soon.

    The other processes of a torchrun that was killed end too, and what they served is gone. So this
    is the reason to report, if there is a choice.
    """
    if _torchrun is None or os.getppid() == _torchrun:
        return
    # The process ends here, so the lock is never released: the reason is reported once.
    _ending.acquire()
    # Standard error may be a pipe that no process reads, and a file system may hang.
    threading.Timer(ORPHAN_SECONDS, os._exit, [PEER_FAILED]).start()
    try:
        run_exit_functions()
        console.stop_lines([f"torchrun (process {_torchrun}), which started it, was killed"])
    finally:
        os._exit(PEER_FAILED)


def _watch_torchrun() -> None:
    while True:
        end_if_torchrun_ended()
        time.sleep(PARENT_POLL_SECONDS)


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent ends. Does nothing except on Linux.

    Args:
        parent: number of the parent process, if known. It may already have ended.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@cache
def hold_until_death(path: Path) -> int:
    """Hold a shared lock on a file as long as this process lives, and return its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def wait_for_holders(path: Path) -> None:
    """Wait until every process that holds a lock file has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def children_die_with_parent() -> Iterator[None]:
    """Make processes that are forked during the block end with this process."""
    global _children_die
    _watch_forks()
    _children_die = True
    try:
        yield
    finally:
        _children_die = False


@cache
def _watch_forks() -> None:
    os.register_at_fork(before=_record_forking_process, after_in_child=_die_if_wanted)


def _record_forking_process() -> None:
    global _forking_process
    _forking_process = os.getpid()


def _die_if_wanted() -> None:
    if _children_die:
        die_with_parent(_forking_process)
