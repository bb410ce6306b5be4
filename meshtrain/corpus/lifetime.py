"""Processes that end with the one that started them, even if it is killed: nobody must write beside its successor."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

PR_SET_PDEATHSIG = 1
_children_die = False


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Linux only; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


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
