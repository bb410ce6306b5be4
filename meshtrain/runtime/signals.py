"""Stop signals: the first requests a stop at the next step; the second ends the process at once.

The main thread may be blocked in a collective, where no Python handler runs. But Python always
writes the number of a signal into a pipe at once. A thread reads it there.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meshtrain.runtime.environment import is_under_torchrun

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
COPY_SECONDS = 3.0
TIME_IS_UP, HOOK = 1, 2
"""Reasons to stop.

They are smaller than all signal numbers, so that among several reasons the signal is named.
"""


@dataclass
class StopRequest:
    """Whether this process was asked to stop.

    Attributes:
        deadline: when the process stops by itself, on the clock of `time.monotonic`; None: never.
        copy_seconds: for this time after a signal, further signals count as copies of it. A queue
            sends a signal to all processes including torchrun, which forwards it.
    """

    deadline: float | None = None
    copy_seconds: float = 0.0
    _signal: int | None = None
    _taken: float = 0.0
    _has_hook_asked: bool = False

    def is_asked(self) -> bool:
        """Return whether a signal has arrived."""
        return self._signal is not None

    def reason(self) -> int:
        """Return 0, TIME_IS_UP, HOOK or the number of the signal.

        It is a number, so that the processes can agree on the largest.
        """
        if self._signal is not None:
            return self._signal
        if self._has_hook_asked:
            return HOOK
        return TIME_IS_UP if self.deadline is not None and time.monotonic() >= self.deadline else 0

    def ask(self) -> None:
        """Record that a hook requests a stop."""
        self._has_hook_asked = True

    def take(self, number: int) -> None:
        """Record a signal. The second one ends the process."""
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._taken = number, now
        elif now - self._taken >= self.copy_seconds:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + number)


def describe_reason(reason: int) -> str:
    """Return the name of a reason that `StopRequest.reason` returned."""
    return {TIME_IS_UP: "stop_after", HOOK: "a hook"}.get(reason) or signal.Signals(reason).name


def report_crashes() -> None:
    """Make a signal that ends this process at once leave the Python stacks on stderr.

    A crash in C++ is such a signal. torch's libraries abort from their own threads, with at most
    one line, which names no caller.
    """
    # A notebook or a service may have replaced stderr by an object without a file. The original one
    # has a file.
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


@contextmanager
def crashes_reported() -> Iterator[None]:
    """Do as `report_crashes` while the block runs, and then restore the previous state."""
    was_enabled = faulthandler.is_enabled()
    report_crashes()
    try:
        yield
    finally:
        if not was_enabled:
            faulthandler.disable()


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Turn SIGTERM and SIGUSR1 into requests while the block runs. For the main thread only."""
    request = StopRequest(copy_seconds=COPY_SECONDS if is_under_torchrun() else 0.0)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.signal(number, _do_nothing) for number in STOP_SIGNALS}
    wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reading, request), name="signals", daemon=True).start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)


def _do_nothing(number: int, frame: object) -> None:
    """Replace the default action, which would end the process."""


def _listen(pipe: int, request: StopRequest) -> None:
    # An empty read means that the other end is closed.
    while numbers := os.read(pipe, 64):
        for number in numbers:
            if number in STOP_SIGNALS:
                request.take(number)
    os.close(pipe)
