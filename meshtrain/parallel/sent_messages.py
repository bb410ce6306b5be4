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
        # gloo does not tell whether a message has arrived, so a thread waits for it.
        self._has_thread = backend_of(device, group) == "gloo"
        self._pending: deque[Works] = deque()
        self._waiter: _Waiter | None = None

    def __enter__(self) -> Self:
        self._waiter = _Waiter() if self._has_thread else None
        return self

    def add(self, works: Works) -> None:
        """Take messages that are on their way, and drop those that have arrived."""
        self._pending.append(works)
        if self._waiter is not None:
            self._waiter.queue.put(works)
        while self._pending and self._has_arrived():
            self._pending.popleft()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is still on its way, unless the step has failed.

        Raises:
            RuntimeError: if a message could not be sent.
        """
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.queue.put(None)
        if error is not None:
            # Another process may have failed, too, and receive nothing.
            self._pending.clear()
            return
        if waiter is not None:
            waiter.join()
            # gloo would wait for ever for a message that has been awaited.
            self._pending.clear()
            if waiter.error is not None:
                raise waiter.error
        while self._pending:
            _wait_for(self._pending.popleft())

    def _has_arrived(self) -> bool:
        """Return whether the first of the messages has arrived."""
        if self._waiter is not None:
            return self._waiter.pop_arrived()
        if not all(work.is_completed() for work in self._pending[0]):
            return False
        _wait_for(self._pending[0])
        return True


class _Waiter(Thread):
    """Waits for messages, one after the other.

    The thread of the step drops them: torch's profiler, which measures the memory of a CPU, does
    not see what other threads free.

    Attributes:
        queue: of the messages; None: there are no more.
        error: of the first message that could not be sent. The later ones are not awaited.
    """

    def __init__(self) -> None:
        super().__init__(name="sent messages", daemon=True)
        self.queue: SimpleQueue[Works | None] = SimpleQueue()
        self.error: Exception | None = None
        self._arrived: deque[None] = deque()
        self.start()

    def pop_arrived(self) -> bool:
        """Return whether one more message has arrived, and count it as dropped."""
        if not self._arrived:
            return False
        self._arrived.popleft()
        return True

    def run(self) -> None:
        while (works := self.queue.get()) is not None:
            try:
                _wait_for(works)
            except Exception as error:  # noqa: BLE001 - the step raises it at its end
                self.error = error
                return
            # No reference is left here once the message counts as arrived.
            del works
            self._arrived.append(None)


def _wait_for(works: Works) -> None:
    for work in works:
        work.wait()
