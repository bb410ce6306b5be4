"""Measure seconds between two points in the work of a device, without waiting at each of them."""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mark:
    """A point in the work of this process.

    Attributes:
        host_seconds: when the host reached the point, on its monotonic clock.
        event: on a GPU, which runs behind the host: the point in its queue; otherwise None.
    """

    host_seconds: float
    event: torch.cuda.Event | None

    def seconds_until(self, later: "Mark") -> float:
        """Return the seconds from this mark to a later one of the same device.

        The device must have reached both, or torch raises a RuntimeError.
        """
        if self.event is None or later.event is None:
            return later.host_seconds - self.host_seconds
        return self.event.elapsed_time(later.event) / 1000.0


def mark(device: torch.device) -> Mark:
    """Mark the end of the work that is queued so far; the host does not wait for it."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
    return Mark(time.perf_counter(), event)
