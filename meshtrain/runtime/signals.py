"""Stop signals: the first is a wish, heard at the next step; the second ends the process at once.

The main thread may be blocked in a collective, where no Python handler runs. What Python does at once, whatever the
main thread is in, is to write the number of a signal into a pipe; a thread reads it there.
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
"""As reasons to stop: less than any of the signals' numbers, so that among several reasons the signal is named."""


@dataclass
class StopRequest:
    """Whether this process was asked to stop.

    Attributes:
        deadline: when it shall stop by itself, on the clock of `time.monotonic`; None: never.
        copy_seconds: so long after a signal another one is the same: a queue sends it to all processes, torchrun
            included, and torchrun hands it on.
    """

    deadline: float | None = None
    copy_seconds: float = 0.0
    _signal: int | None = None
    _taken: float = 0.0
    _has_hook_asked: bool = False

    def is_asked(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    def reason(self) -> int:
        """Return 0, TIME_IS_UP, HOOK or the number of the signal: a number, for processes to agree on the largest."""
        if self._signal is not None:
            return self._signal
        if self._has_hook_asked:
            return HOOK
        return TIME_IS_UP if self.deadline is not None and time.monotonic() >= self.deadline else 0

    def ask(self) -> None:
        """Note the wish of a hook."""
        self._has_hook_asked = True

    def take(self, number: int) -> None:
        """Note a signal; the second one ends the process."""
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._taken = number, now
        elif now - self._taken >= self.copy_seconds:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + number)


def describe_reason(reason: int) -> str:
    """Say what `StopRequest.reason` returned."""
    return {TIME_IS_UP: "stop_after", HOOK: "a hook"}.get(reason) or signal.Signals(reason).name


def tell_of_crashes() -> None:
    """Let a signal that ends this process at once, as a crash in C++ does, leave the Python stacks on stderr.

    torch's libraries abort from their own threads, with a line that names no caller, if any.
    """
    # A notebook or a service may have put something without a file there: what the interpreter began with has one.
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Let SIGTERM and SIGUSR1 be requests while the block runs. In the main thread only."""
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
    """Stand in for the default action, which would end the process."""


def _listen(pipe: int, request: StopRequest) -> None:
    # Empty: the other end is closed.
    while numbers := os.read(pipe, 64):
        for number in numbers:
            if number in STOP_SIGNALS:
                request.take(number)
    os.close(pipe)
