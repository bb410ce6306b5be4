"""The events of a trace of torch's profiler, as its file has them. Times are in microseconds."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from meshtrain.compat.operators_seen import MESSAGES

Event = dict[str, Any]
Interval = tuple[float, float]
"""Begin and end."""
MICROSECONDS = 1e-6
"""A microsecond in seconds."""


class Section(NamedTuple):
    """A section of time in a thread."""

    begin: float
    end: float
    thread: int


def sections_named(events: Iterable[Event], name: str) -> list[Section]:
    """Return the ranges that the program has marked with a name, in order."""
    found = (event for event in events if event.get("cat") == "user_annotation" and event["name"] == name)
    return sorted(Section(*interval(event), event["tid"]) for event in found)


def interval(event: Event) -> Interval:
    """Return begin and end of an event."""
    return event["ts"], event["ts"] + event["dur"]


def outermost(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the operators that no other operator of their thread has called, in order."""
    ends: dict[int, float] = {}
    operators = (event for event in events if event.get("cat") == "cpu_op" and "dur" in event)
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = interval(event)
        if begin >= ends.get(event["tid"], begin):
            ends[event["tid"]] = end
            yield event


def is_nccl(event: Event) -> bool:
    """Return whether an event is a kernel that sends messages."""
    return event.get("cat") == "kernel" and event["name"].startswith("nccl")


def busy_on_gpu(events: Iterable[Event]) -> list[Interval]:
    """Return when kernels of the GPU computed."""
    return [interval(event) for event in events if event.get("cat") == "kernel" and not is_nccl(event)]


def busy_on_cpu(events: Iterable[Event], thread: int) -> list[Interval]:
    """Return when operators of a thread computed, without those that send messages or wait."""
    return [
        interval(event)
        for event in outermost(events)
        if event["tid"] == thread and event["name"].partition("::")[0] not in MESSAGES
    ]


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of intervals."""
    return sum(end - begin for begin, end in intervals)


def uncovered(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Return the length of the union of `intervals` outside of all `others`."""
    found, covering = _union(intervals), _union(others)
    covered, first = 0.0, 0
    for begin, end in found:
        while first < len(covering) and covering[first][1] <= begin:
            first += 1
        at = first
        while at < len(covering) and covering[at][0] < end:
            covered += min(end, covering[at][1]) - max(begin, covering[at][0])
            at += 1
    return length(found) - covered


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times as intervals that are in order and do not touch."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined
