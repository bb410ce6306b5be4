"""The time of one process: what it computes, and which messages travel meanwhile."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import add

from meshtrain.compat.operators_seen import GATHERED, shown_name
from meshtrain.config.mesh import REPLICA_AXES
from meshtrain.planning.simulation.profile import ActionProfile
from meshtrain.planning.simulation.recorder import Sent, Work, sent_and_computed
from meshtrain.planning.speed.rates import Rates


@dataclass
class AxisTime:
    """The messages of a process over one axis in a step.

    Attributes:
        num_bytes: of their larger sides.
        seconds: that they travel.
        exposed_seconds: in which the process does nothing else.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class _Item:
    """A message, or what is computed between two of them.

    Attributes:
        seconds: that it takes.
        exposed_seconds: by which it delays what follows.
        message: None for computation.
        kind: of the message, as `shown_name` returns it.
        axis: of the message.
        needs_gathered: whether the computation begins with the copy of gathered parameters.
    """

    seconds: float
    exposed_seconds: float
    message: Work | None = None
    kind: str = ""
    axis: str = ""
    needs_gathered: bool = False


@dataclass(frozen=True)
class _Plain:
    """What is done one after the other, because no message travels meanwhile.

    Attributes:
        seconds: that each message is waited for, and of what is computed between two.
        messages: axis -> bytes of all messages, and for each the seconds that it travels and is
            waited for.
    """

    seconds: list[float]
    messages: dict[str, tuple[int, list[tuple[float, float]]]]


@dataclass(frozen=True)
class _Busy:
    """An action in which messages travel meanwhile.

    Attributes:
        items: in their order.
        is_backward: whether it belongs to a backward pass.
        begins_gradients: whether all reductions end before it.
    """

    items: list[_Item]
    is_backward: bool
    begins_gradients: bool


@dataclass(frozen=True)
class _Known:
    """What some actions do.

    Attributes:
        steps: in their order.
        actions: kept so that no other object gets their number.
    """

    steps: list[_Busy | _Plain]
    actions: Sequence[ActionProfile]


@dataclass
class Clock:
    """The clock of one process.

    On an asynchronous machine FSDP2 gathers the next parameters, and reduces the last gradients,
    while a layer computes. It allows two gathered layers at a time in a forward pass, one more than
    computes in a backward pass, and one reduction at a time.

    Attributes:
        rates: of the machine.
        now: seconds since the begin of the step.
        axes: the messages until now.
    """

    rates: Rates
    now: float = 0.0
    axes: dict[str, AxisTime] = field(default_factory=dict)
    _known: dict[int, _Known] = field(default_factory=dict)
    _gathers_end: float = 0.0
    _pending: deque[float] = field(default_factory=deque)
    _copied: deque[float] = field(default_factory=lambda: deque([0.0, 0.0], maxlen=2))
    _reductions_end: float = 0.0

    def run(self, actions: Sequence[ActionProfile]) -> None:
        """Go through some actions. Passes that share them take as long as each other."""
        key = id(actions)
        if key not in self._known:
            self._known[key] = _Known([*self._steps(actions)], actions)
        for step in self._known[key].steps:
            if isinstance(step, _Plain):
                self._do_plain(step)
            else:
                self._do_busy(step)

    def finish_reductions(self) -> None:
        """Wait for all reductions of gradients."""
        self._wait(self._reductions_end, self.rates.fsdp_axis)

    def add_message(self, axis: str, num_bytes: int, seconds: float) -> AxisTime:
        """Count a message, and return the times of its axis."""
        found = self.axes.setdefault(axis, AxisTime())
        found.num_bytes += num_bytes
        found.seconds += seconds
        return found

    def _steps(self, actions: Sequence[ActionProfile]) -> Iterator[_Busy | _Plain]:
        """Yield what the actions do; those in which no message travels meanwhile are joined."""
        found = [self._busy(action) for action in actions]
        for is_busy, group in groupby(found, key=self._is_busy):
            if is_busy:
                yield from group
            else:
                yield _plain([item for it in group for item in it.items])

    def _busy(self, action: ActionProfile) -> _Busy:
        items = [self._item(it, action.phase) for it in sent_and_computed(action.work)]
        return _Busy(items, action.phase.startswith("backward"), action.phase == "gradients")

    def _is_busy(self, found: _Busy) -> bool:
        travels = (it.needs_gathered or self._travels(it, is_backward=found.is_backward) for it in found.items)
        return found.begins_gradients or any(travels)

    def _item(self, found: Sent | Counter[Work], phase: str) -> _Item:
        if isinstance(found, Sent):
            message = found.message
            is_sum = self.rates.posts_sums and phase.startswith("backward") and message.axis in REPLICA_AXES
            seconds, exposed = self.rates.sent_seconds(found, is_posted=is_sum)
            return _Item(seconds, exposed, message, shown_name(message.name), message.axis or "other")
        needs_gathered = any(kind.name == GATHERED for kind in found)
        seconds = self.rates.compute_seconds(found, in_optimizer=phase == "optimizer")
        return _Item(seconds, seconds, needs_gathered=needs_gathered)

    def _travels(self, item: _Item, *, is_backward: bool) -> bool:
        """Return whether an item is a message that travels while the process computes."""
        if item.message is None or not self.rates.is_asynchronous:
            return False
        return item.kind in ("allgather", "reduce_scatter") or (is_backward and item.axis in REPLICA_AXES)

    def _do_plain(self, plain: _Plain) -> None:
        """Go through an action in which no message travels meanwhile."""
        # As one after the other, because the sum of floats depends on their order.
        self.now = reduce(add, plain.seconds, self.now)
        for axis, (num_bytes, parts) in plain.messages.items():
            times = self.add_message(axis, num_bytes, 0.0)
            times.seconds = reduce(add, (seconds for seconds, _ in parts), times.seconds)
            times.exposed_seconds = reduce(add, (exposed for _, exposed in parts), times.exposed_seconds)

    def _do_busy(self, busy: _Busy) -> None:
        if busy.begins_gradients:
            self.finish_reductions()
        for item in busy.items:
            if item.message is None:
                self._compute(item)
            else:
                self._send(item, item.message.num_bytes, is_backward=busy.is_backward)

    def _compute(self, item: _Item) -> None:
        if item.needs_gathered and self._pending:
            self._wait(self._pending.popleft(), self.rates.fsdp_axis)
            self._copied.append(self.now)
        self.now += item.seconds

    def _send(self, item: _Item, num_bytes: int, *, is_backward: bool) -> None:
        axis, seconds = item.axis, item.seconds
        times = self.add_message(axis, num_bytes, seconds)
        if not self._travels(item, is_backward=is_backward):
            times.exposed_seconds += item.exposed_seconds
            self.now += item.exposed_seconds
        elif item.kind == "allgather":
            begin = max(self._gathers_end, self._copied[-1 if is_backward else 0])
            self._gathers_end = begin + seconds
            self._pending.append(self._gathers_end)
        elif item.kind == "reduce_scatter":
            self._wait(self._reductions_end, axis)
            self._reductions_end = self.now + seconds
        else:
            self._reductions_end = max(self._reductions_end, self.now) + seconds

    def _wait(self, until: float, axis: str) -> None:
        if until > self.now:
            self.axes.setdefault(axis, AxisTime()).exposed_seconds += until - self.now
            self.now = until


def _plain(items: Sequence[_Item]) -> _Plain:
    messages: dict[str, tuple[int, list[tuple[float, float]]]] = {}
    for item in items:
        if item.message is not None:
            num_bytes, seconds = messages.get(item.axis, (0, []))
            seconds.append((item.seconds, item.exposed_seconds))
            messages[item.axis] = num_bytes + item.message.num_bytes, seconds
    return _Plain([item.exposed_seconds for item in items], messages)
