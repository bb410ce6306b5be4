"""The steps of all processes of a pipeline, event by event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshtrain.compat.schedules import BACKWARD, FORWARD, WEIGHTS, Border, Instruction, Pass
from meshtrain.pictures.timeline import Kind, Lane, Span, Timeline, bubble
from meshtrain.planning.simulation.profile import AHEAD, ActionProfile, RankProfile
from meshtrain.planning.speed.clock import AxisTime, Clock
from meshtrain.planning.speed.rates import Rates

KINDS: dict[str, Kind] = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weight gradient"}


@dataclass(frozen=True)
class Replay:
    """A step of all pp ranks.

    Attributes:
        seconds: from the begin to the end of the last process.
        bubble: share of the time in which pp ranks wait for others, on average.
        axes: axis -> the messages of the pp rank that has the most exposed seconds on it.
        timeline: with a lane for each pp rank.
    """

    seconds: float
    bubble: float
    axes: dict[str, AxisTime]
    timeline: Timeline

    def without_timeline(self) -> "Replay":
        """Return the same without what each pp rank does when, which may be long."""
        return replace(self, timeline=Timeline(()))


def replay(
    profiles: Sequence[RankProfile],
    programs: Sequence[Sequence[Instruction]],
    border_bytes: Mapping[tuple[str, int], int],
    rates: Rates,
    names: Sequence[str],
) -> Replay:
    """Let all processes of a pipeline go through a step.

    Args:
        profiles: what each pp rank does.
        programs: in which order, with what it sends and awaits.
        border_bytes: (phase, stage that sends) -> bytes of a message between stages.
        rates: of the machine.
        names: of the pp ranks.
    """
    network = _Network(border_bytes, rates)
    ranks = [_Rank(profile, program, Clock(rates)) for profile, program in zip(profiles, programs, strict=True)]
    ready = 0.0
    for rank in ranks:
        ready = rank.begin(ready)
    while not all(rank.is_done for rank in ranks):
        went_on = [rank.go_on(network) for rank in ranks]
        if not any(went_on):
            raise RuntimeError("the processes of the schedule wait for each other")
    for rank in ranks:
        rank.finish_gradients()
    # The norm of the gradients needs all processes.
    together = max(rank.clock.now for rank in ranks)
    for rank in ranks:
        rank.update(together)
    seconds = max(rank.clock.now for rank in ranks)
    timeline = Timeline(tuple(Lane(name, tuple(rank.spans)) for name, rank in zip(names, ranks, strict=True)))
    return Replay(seconds, bubble(timeline), _worst_axes(ranks), timeline)


class _Network:
    """The messages between stages. They travel once both sides have posted them."""

    def __init__(self, border_bytes: Mapping[tuple[str, int], int], rates: Rates) -> None:
        self._bytes = border_bytes
        self._seconds = {key: rates.border_seconds(size) for key, size in border_bytes.items()}
        # When the first side has posted a message, and when it has arrived.
        self._posted: dict[Border, float] = {}
        self._ends: dict[Border, float] = {}
        self._link_ends: dict[tuple[str, int], float] = {}

    def post(self, messages: Sequence[Border], clock: Clock) -> None:
        """Send or receive messages."""
        for message in messages:
            link = message.phase, message.stage
            seconds = self._seconds[link]
            clock.add_message("pp", self._bytes[link], seconds)
            if message not in self._posted:
                self._posted[message] = clock.now
                continue
            begin = max(self._posted[message], clock.now, self._link_ends.get(link, 0.0))
            self._ends[message] = self._link_ends[link] = begin + seconds

    def end_of(self, messages: Sequence[Border]) -> tuple[float, float] | None:
        """Return when some messages have arrived and how long the last one travels.

        None: one of them has not been posted on both sides.
        """
        if any(message not in self._ends for message in messages):
            return None
        return max((self._ends[it], self._seconds[it.phase, it.stage]) for it in messages)


class _Rank:
    """A process that goes through its program."""

    def __init__(self, profile: RankProfile, program: Sequence[Instruction], clock: Clock) -> None:
        self.clock, self.spans = clock, list[Span]()
        self._before, self._passes, self._behind = profile.before, profile.passes, profile.behind
        self._program, self._next = program, 0
        self._stages = {it.stage for it in self._passes}
        self._of_inputs = {it._replace(phase=BACKWARD) for it in self._passes if it.phase == WEIGHTS}
        self._is_alone = all(it.do == "compute" for it in program)

    @property
    def is_done(self) -> bool:
        """Return whether all passes are done."""
        return self._next == len(self._program)

    def begin(self, ready: float) -> float:
        """Do what comes before the passes.

        Args:
            ready: when the first stage of the teacher on this process gets the first microbatch.

        Returns:
            When the next stage gets it.
        """
        first = next((at for at, action in enumerate(self._before) if action.phase == AHEAD), len(self._before))
        self._run("other", self._before[:first])
        if first < len(self._before):
            self._add("wait", ready, None)
        self._run("other", self._before[first : first + 1])
        ready = self.clock.now
        self._run("other", self._before[first + 1 :])
        return ready

    def go_on(self, network: _Network) -> bool:
        """Go on until a message has not come. Return whether anything was done."""
        first = self._next
        while self._next < len(self._program) and self._do(self._program[self._next], network):
            self._next += 1
        return self._next > first

    def finish_gradients(self) -> None:
        """Complete the gradients after the passes."""
        self._run("gradients", tuple(action for action in self._behind if action.phase != "optimizer"))

    def update(self, begin: float) -> None:
        """Update the parameters, once all processes have their gradients."""
        self._add("wait", begin, None)
        self._run("optimizer", tuple(action for action in self._behind if action.phase == "optimizer"))

    def _do(self, instruction: Instruction, network: _Network) -> bool:
        if instruction.computed is not None:
            it = instruction.computed
            kind: Kind = "input gradient" if it in self._of_inputs else KINDS[it.phase]
            self._run(kind, self._passes[it], it)
        elif instruction.do == "await":
            found = network.end_of(instruction.messages)
            if found is None:
                return False
            until, seconds = found
            if until > self.clock.now:
                self.clock.add_message("pp", 0, 0.0).exposed_seconds += min(seconds, until - self.clock.now)
            is_send = all(it.stage in self._stages for it in instruction.messages)
            self._add("send" if is_send else "wait", until, None)
        else:
            network.post(instruction.messages, self.clock)
        return True

    def _run(self, kind: Kind, actions: Sequence[ActionProfile], of: Pass | None = None) -> None:
        begin = self.clock.now
        self.clock.run(actions)
        if of is not None and of.phase == BACKWARD and self._is_alone:
            # FSDP2 ends a backward pass when its gradients are reduced. In a pipeline it does not.
            self.clock.finish_reductions()
        end, self.clock.now = self.clock.now, begin
        self._add(kind, end, of)

    def _add(self, kind: Kind, until: float, of: Pass | None) -> None:
        """Let the process do something until a point in time."""
        if until > self.clock.now:
            stage, microbatch = (None, None) if of is None else (of.stage, of.microbatch)
            self.spans.append(Span(kind, self.clock.now, until, stage, microbatch))
            self.clock.now = until


def _worst_axes(ranks: Sequence[_Rank]) -> dict[str, AxisTime]:
    found: dict[str, AxisTime] = {}
    for rank in ranks:
        for axis, times in rank.clock.axes.items():
            if axis not in found or times.exposed_seconds > found[axis].exposed_seconds:
                found[axis] = times
    return found
