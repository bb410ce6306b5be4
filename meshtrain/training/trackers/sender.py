"""A thread that sends points, for trackers whose calls wait for a server."""

from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Generic, TypeVar

from meshtrain.training.trackers.tracker import first_line

T = TypeVar("T")


class Sender(Generic[T]):
    """Sends points in their order, so that training never waits for a server.

    Points that cannot be sent are kept, and sent again with the next ones.

    Args:
        send: sends some points; raises an exception if it cannot.
        warn: called with the reason when sending begins to fail.
        at_once: largest number of points in a call of `send`.
    """

    def __init__(self, send: Callable[[Sequence[T]], None], warn: Callable[[str], None], *, at_once: int) -> None:
        self._send, self._warn, self._at_once = send, warn, at_once
        self._waiting: list[T] = []
        self._changed = Condition()
        self._has_new = self._is_closing = self._is_failing = False
        self._thread = Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    def add(self, points: Sequence[T]) -> None:
        """Send these points soon."""
        with self._changed:
            self._waiting += points
            self._has_new = True
            self._changed.notify()

    def close(self, seconds: float) -> int:
        """Wait for the points that have not been sent, for so many seconds at most.

        Returns:
            The number of points that have not been sent.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(seconds)
        return len(self._waiting)

    def _run(self) -> None:
        while points := self._next():
            try:
                self._send(points)
            except Exception as error:  # noqa: BLE001 - a store may raise anything; the user is told, and points stay
                self._note_failure(error)
                if self._is_closing:
                    return
            else:
                with self._changed:
                    del self._waiting[: len(points)]
                self._is_failing = False

    def _next(self) -> list[T]:
        """Return the next points, once there are any; none if there will be none."""
        with self._changed:
            # After a failure, the next attempt comes with the next points.
            self._changed.wait_for(
                lambda: self._is_closing or self._has_new or (self._waiting and not self._is_failing)
            )
            self._has_new = False
            return self._waiting[: self._at_once]

    def _note_failure(self, error: Exception) -> None:
        if not self._is_failing:
            self._warn(first_line(error))
        self._is_failing = True
