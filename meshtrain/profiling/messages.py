"""The messages of a traced step: number and bytes as a simulation counts them, and seconds."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from meshtrain.compat.autograd import OperatorMode
from meshtrain.compat.operators_seen import MESSAGES, WAITS, name_of, shown_name, tensors_of
from meshtrain.planning.simulation.recorder import message_of
from meshtrain.profiling.files import ProfiledMessages
from meshtrain.profiling.trace import (
    MICROSECONDS,
    Event,
    Interval,
    Section,
    interval,
    is_nccl,
    length,
    outermost,
    uncovered,
)

PAIRS = ("send", "recv")
"""Operators that send a message from one process to another. All others are collectives."""
GLOO = "gloo:"
NCCL_CALL = "record_param_comms"
"""The event of a call of NCCL. It names the process group."""
ELEMENT_BYTES = {
    **dict.fromkeys(("Bool", "Byte", "Char"), 1),
    **dict.fromkeys(("BFloat16", "Half", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long"), 8),
}


class Message(NamedTuple):
    """A message of a process.

    Attributes:
        axis: of the mesh.
        operator: such as "allreduce".
        num_bytes: of its larger side.
        times: when it was under way, in microseconds.
    """

    axis: str
    operator: str
    num_bytes: int
    times: tuple[Interval, ...] = ()


class MarkedMessages(OperatorMode):
    """Keeps all messages, in order, and marks each in the trace with its axis.

    It is needed for gloo, whose events do not name their process group.

    Attributes:
        messages: while the mode was active, without times.

    Args:
        axes: name of a process group -> axis of the mesh.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self._axes = axes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; if it sends a message, keep that."""
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor runs the operator again, on the local parts.
            return NotImplemented
        namespace, name = name_of(func)
        given = tensors_of(args)
        if namespace not in MESSAGES or name in WAITS or any(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)
        axis, operator = message_of(name, args, given, self._axes).axis or "other", shown_name(name)
        with record_function(f"message over {axis}: {operator}"):
            result = func(*args, **kwargs)
        largest = message_of(name, args, [*given, *tensors_of(result)], self._axes).num_bytes
        self.messages.append(Message(axis, operator, largest))
        return result


def gloo_messages(events: Iterable[Event], messages: Sequence[Message]) -> list[Message]:
    """Return the messages of a traced step with their times.

    gloo runs what is asked of it in that order, but messages between two processes apart from
    collectives.

    Args:
        events: of the trace.
        messages: as `MarkedMessages` has kept them.
    """
    runs = sorted((event for event in events if event["name"].startswith(GLOO) and "dur" in event), key=_begin)
    times: dict[int, Interval] = {}
    for is_pair in (True, False):
        asked = [index for index, message in enumerate(messages) if (message.operator in PAIRS) == is_pair]
        found = [run for run in runs if (run["name"].removeprefix(GLOO) in PAIRS) == is_pair]
        times |= {index: interval(run) for index, run in zip(asked, found, strict=False)}
    return [
        message._replace(times=(times[index],)) if index in times else message for index, message in enumerate(messages)
    ]


def nccl_messages(events: Sequence[Event], section: Section, axes: Mapping[str, str]) -> list[Message]:
    """Return the messages of a traced step with the times of their kernels.

    Args:
        events: of the trace.
        section: the step.
        axes: name of a process group -> axis of the mesh.
    """
    calls = _Calls(events)
    kernels: dict[Any, list[Interval]] = defaultdict(list)
    for event in filter(is_nccl, events):
        kernels[event["args"].get("External id")].append(interval(event))
    messages = []
    for operator in outermost(events):
        namespace, _, name = operator["name"].partition("::")
        if namespace not in MESSAGES or name in WAITS or not section.begin <= operator["ts"] <= section.end:
            continue
        inside = calls.inside(operator)
        axis = next((axes[it["Process Group Name"]] for it in inside if it.get("Process Group Name") in axes), "other")
        times = [time for it in inside for time in kernels.get(it.get("External id"), ())]
        messages.append(Message(axis, shown_name(name), max(map(_call_bytes, inside), default=0), tuple(times)))
    return messages


class _Calls:
    """The calls of NCCL in a trace, by thread and in order."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._calls: dict[int, list[Event]] = defaultdict(list)
        for event in sorted((event for event in events if event["name"] == NCCL_CALL), key=_begin):
            self._calls[event["tid"]].append(event)

    def inside(self, operator: Event) -> list[Mapping[str, Any]]:
        """Return what the trace says about the calls that an operator makes."""
        calls, (begin, end) = self._calls[operator["tid"]], interval(operator)
        first, behind = bisect_left(calls, begin, key=_begin), bisect_right(calls, end, key=_begin)
        return [call["args"] for call in calls[first:behind]]


def _begin(event: Event) -> float:
    return float(event["ts"])


def _call_bytes(call: Mapping[str, Any]) -> int:
    elements = max(call.get("In msg nelems", 0), call.get("Out msg nelems", 0))
    return elements * ELEMENT_BYTES.get(call.get("dtype", ""), 0)


def summed(messages: Iterable[Message]) -> tuple[ProfiledMessages, ...]:
    """Return the sums for each axis and operator."""
    groups: dict[tuple[str, str], list[Message]] = defaultdict(list)
    for message in messages:
        groups[message.axis, message.operator].append(message)
    return tuple(
        ProfiledMessages(
            axis=axis,
            operator=operator,
            number=len(found),
            bytes=sum(message.num_bytes for message in found),
            seconds=sum(length(message.times) for message in found) * MICROSECONDS,
        )
        for (axis, operator), found in sorted(groups.items())
    )


def exposed_seconds(messages: Iterable[Message], busy: Sequence[Interval]) -> dict[str, float]:
    """Return axis -> seconds in which messages were under way and nothing was computed.

    Args:
        messages: with their times.
        busy: when the device of the process computed.
    """
    times: dict[str, list[Interval]] = defaultdict(list)
    for message in messages:
        times[message.axis].extend(message.times)
    return {axis: uncovered(found, busy) * MICROSECONDS for axis, found in sorted(times.items())}
