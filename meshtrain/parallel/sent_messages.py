"""Messages that a stage has sent, and the memory of those that have arrived."""

from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from meshtrain.compat.distributed import backend_of

Works = Sequence[dist.Work]


class SentMessages:
    """The messages that this process sends in a step.

    A message keeps its tensor until somebody has waited for it. torch's schedules do so after the
    last pass, so memory would grow with the number of microbatches. Here a message is dropped when
    it has arrived. No pass waits for one that has not: the receiver may first need something else
    from this process.

    It is a context manager for one step, which ends when all messages have arrived.

    Args:
        group: over which they are sent.
        device: of their tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # gloo does not tell whether a message has arrived.
        self._kind = _Awaited if backend_of(device, group) == "gloo" else _Polled
        self._messages: _Awaited | _Polled

    def __enter__(self) -> Self:
        self._messages = self._kind()
        return self

    def add(self, works: Works) -> None:
        """Take messages that are on their way, and drop those that have arrived."""
        self._messages.add(works)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is still on its way, unless the step has failed.

        Raises:
            RuntimeError: if a message could not be sent.
        """
        if error is None:
            self._messages.finish()
        else:
            # Another process may have failed, too, and receive nothing.
            self._messages.abandon()


class _Polled:
    """Messages that tell whether they have arrived."""

    def __init__(self) -> None:
        self._pending: deque[Works] = deque()

    def add(self, works: Works) -> None:
        self._pending.append(works)
        while self._pending and all(work.is_completed() for work in self._pending[0]):
            _wait_for(self._pending.popleft())

    def finish(self) -> None:
        while self._pending:
            _wait_for(self._pending.popleft())

    def abandon(self) -> None:
        self._pending.clear()


class _Awaited:
    """Messages that a thread waits for, one after the other. A message of gloo can be awaited once.

    The thread of the step drops them: torch's profiler, which measures the memory of a CPU, does
    not see what other threads free.
    """

    def __init__(self) -> None:
        self._pending: deque[Works] = deque()
        # None: there are no more.
        self._queue: SimpleQueue[Works | None] = SimpleQueue()
        # One entry for each message that has arrived and is not dropped.
        self._arrived: deque[None] = deque()
        self._error: Exception | None = None
        self._thread = Thread(target=self._wait, name="sent messages", daemon=True)
        self._thread.start()

    def add(self, works: Works) -> None:
        self._pending.append(works)
        self._queue.put(works)
        while self._arrived:
            self._arrived.popleft()
            self._pending.popleft()

    def finish(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._pending.clear()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        self._queue.put(None)
        self._pending.clear()

    def _wait(self) -> None:
        while (works := self._queue.get()) is not None:
            try:
                _wait_for(works)
            except Exception as error:  # noqa: BLE001 - the step raises it at its end
                self._error = error
                return
            # No reference is left here once the message counts as arrived.
            del works
            self._arrived.append(None)


def _wait_for(works: Works) -> None:
    for work in works:
        work.wait()
