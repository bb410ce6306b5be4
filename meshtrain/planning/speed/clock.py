"""The time of one process: what it computes, and which messages travel meanwhile."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshtrain.compat.fake import GATHERED, shown_name
from meshtrain.config.mesh import REPLICA_AXES
from meshtrain.planning.simulation.profile import ActionProfile
from meshtrain.planning.simulation.recorder import Work
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
        message: None for computation.
        needs_gathered: whether the computation begins with the copy of gathered parameters.
    """

    seconds: float
    message: Work | None = None
    needs_gathered: bool = False


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
    _known: dict[int, tuple[list[_Item], object]] = field(default_factory=dict)
    _gathers_end: float = 0.0
    _pending: deque[float] = field(default_factory=deque)
    _copied: deque[float] = field(default_factory=lambda: deque([0.0, 0.0], maxlen=2))
    _reductions_end: float = 0.0

    def run(self, actions: Iterable[ActionProfile]) -> None:
        """Go through some actions."""
        for action in actions:
            is_backward = action.phase.startswith("backward")
            if action.phase == "gradients":
                self.finish_reductions()
            for item in self._items(action):
                if item.message is None:
                    self._compute(item)
                else:
                    self._send(item.message, item.seconds, is_backward=is_backward)

    def finish_reductions(self) -> None:
        """Wait for all reductions of gradients."""
        self._wait(self._reductions_end, self.rates.fsdp_axis)

    def add_message(self, axis: str, num_bytes: int, seconds: float) -> AxisTime:
        """Count a message, and return the times of its axis."""
        found = self.axes.setdefault(axis, AxisTime())
        found.num_bytes += num_bytes
        found.seconds += seconds
        return found

    def _items(self, action: ActionProfile) -> list[_Item]:
        if id(action.work) not in self._known:
            # The work is kept too, so that no other object gets its number.
            self._known[id(action.work)] = [self._item(work, action.phase) for work in action.work], action.work
        return self._known[id(action.work)][0]

    def _item(self, work: Counter[Work] | Work, phase: str) -> _Item:
        if isinstance(work, Work):
            return _Item(self.rates.message_seconds(work), work)
        needs_gathered = any(kind.name == GATHERED for kind in work)
        return _Item(self.rates.compute_seconds(work, in_optimizer=phase == "optimizer"), None, needs_gathered)

    def _compute(self, item: _Item) -> None:
        if item.needs_gathered and self._pending:
            self._wait(self._pending.popleft(), self.rates.fsdp_axis)
            self._copied.append(self.now)
        self.now += item.seconds

    def _send(self, message: Work, seconds: float, *, is_backward: bool) -> None:
        axis, name = message.axis or "other", shown_name(message.name)
        times = self.add_message(axis, message.num_bytes, seconds)
        if self.rates.is_asynchronous and name == "allgather":
            begin = max(self._gathers_end, self._copied[-1 if is_backward else 0])
            self._gathers_end = begin + seconds
            self._pending.append(self._gathers_end)
        elif self.rates.is_asynchronous and name == "reduce_scatter":
            self._wait(self._reductions_end, axis)
            self._reductions_end = self.now + seconds
        elif self.rates.is_asynchronous and is_backward and axis in REPLICA_AXES:
            self._reductions_end = max(self._reductions_end, self.now) + seconds
        else:
            times.exposed_seconds += seconds
            self.now += seconds

    def _wait(self, until: float, axis: str) -> None:
        if until > self.now:
            self.axes.setdefault(axis, AxisTime()).exposed_seconds += until - self.now
            self.now = until
