"""Run commands in processes of their own, which receive the signals of this one."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
}
"""Signal to this process -> signal to the command."""
POLL_SECONDS = 0.05


@dataclass
class Commands:
    """Runs commands one after another.

    Attributes:
        asked: the first signal that this process received; None if none did. No command should
            begin after it.
    """

    asked: signal.Signals | None = None
    _to_pass_on: list[int] = field(default_factory=list)

    def run(self, command: Sequence[str]) -> int:
        """Run a command until it ends, and return its exit code; negative: ended by that signal."""
        sys.stdout.flush()
        # In a session of its own: ctrl-C reaches all processes of a terminal, so the command would
        # receive it twice, and a second signal ends a run at once.
        with subprocess.Popen(command, start_new_session=True) as child:
            while (code := child.poll()) is None:
                while self._to_pass_on:
                    child.send_signal(PASSED_ON[signal.Signals(self._to_pass_on.pop(0))])
                time.sleep(POLL_SECONDS)
        return code

    def take(self, number: int, frame: object) -> None:
        """Record a signal. Python calls this in the main thread."""
        self.asked = self.asked or signal.Signals(number)
        self._to_pass_on.append(number)


@contextmanager
def commands_in_turn() -> Iterator[Commands]:
    """Pass signals on to commands while the block runs. For the main thread only."""
    commands = Commands()
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    for number, handler in before.items():
        # A signal that was ignored stays ignored, as `nohup` requires.
        if handler != signal.SIG_IGN:
            signal.signal(number, commands.take)
    try:
        yield commands
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
