"""Tests that crash, for test_crashes.py; pytest runs them only if they are named."""

import ctypes
import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

from tests.ranks import run_on_ranks


def crash_in_gloo() -> None:
    """Crash like an error in C++, in a thread that Python does not know."""
    # The thread has its name once it has run something.
    dist.barrier()
    tasks = Path("/proc/self/task")
    thread = next(int(task.name) for task in tasks.iterdir() if "pt_gloo_runloop" in (task / "comm").read_text())
    ctypes.CDLL(None).tgkill(os.getpid(), thread, signal.SIGSEGV)
    time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_that_crashes_once() -> None:
    been_here = Path(os.environ["BEEN_HERE"])
    if not been_here.exists():
        been_here.touch()
        run_on_ranks(1, crash_in_gloo)


def test_that_is_killed() -> None:
    run_on_ranks(1, die)
