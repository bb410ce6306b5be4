"""Find out which tensors cross the borders between the stages of a cut.

A stage runs the model's own forward, in which its own parts compute and stubs stand for the others.
Code of the model outside of parts runs on every stage. So a stage needs from others only what its
own parts receive, or what this code computes together with results of its own parts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from meshtrain.parallel.cut.nest import Path
from meshtrain.parallel.cut.trace import OUTPUT, Call, Seen, TensorKey, Trace


class NotCuttableError(Exception):
    """The parts of a model cannot be divided among stages; the message says why."""


@dataclass(frozen=True)
class Place:
    """Where a tensor passes in a forward pass: a path in the inputs or results of a call.

    Attributes:
        call: number of the call.
        side: `input`, `output`, or `written` into a mapping among the arguments.
        path: in the nest of this side.
    """

    call: int
    side: Literal["input", "output", "written"]
    path: Path

    def seen_in(self, trace: Trace) -> Seen:
        """Return the tensor at this place in a trace."""
        call = trace.calls[self.call]
        leaves = {"input": call.inputs, "output": call.outputs, "written": call.written}
        return leaves[self.side][self.path]

    def follows_sequence(self, trace: Trace) -> bool | None:
        """Return whether sequence parallelism splits the tensor.

        It splits the first result of a layer, and nothing that is computed outside of the layers.
        None: nothing tells.
        """
        call = trace.calls[self.call]
        if call.layer is not None and self.side == "output" and self.path == next(iter(call.outputs)):
            return True
        sources = [trace.calls[it] for it in self.seen_in(trace).sources if isinstance(it, int)]
        return False if all(source.layer is None for source in sources) else None

    def described(self, trace: Trace) -> str:
        """Return the place in words."""
        name = trace.calls[self.call].name
        # The path of an input begins with the number of args or kwargs.
        inner = self.path[1:] if self.side in ("input", "written") else self.path
        what = ".".join(map(str, inner))
        match self.side:
            case "output":
                return f"result {what} of {name}" if what else f"result of {name}"
            case "written":
                return f"{what}, from {name}"
            case _:
                return f"input {what} of {name}"


@dataclass(frozen=True)
class Value:
    """A tensor that crosses borders.

    Attributes:
        captured_at: where the stage that computes it takes it.
        producer: this stage.
    """

    captured_at: Place
    producer: int


@dataclass
class StageRoutes:
    """What one stage receives and passes on.

    Attributes:
        own: numbers of the calls of its own parts.
        received: values, in the order in which they arrive.
        placed: place of a received value in the forward pass of this stage -> its index.
        sent: for each value of the next border, the index in `received`, or the place at which this
            stage takes it.
        ends_at: number of the last call that this stage needs.
    """

    own: frozenset[int] = frozenset()
    received: tuple[Value, ...] = ()
    placed: dict[Place, int] = field(default_factory=dict)
    sent: tuple[int | Place, ...] = ()
    ends_at: int = -1


def find_routes(trace: Trace, stages: "Stages") -> list[StageRoutes]:
    """Return the routes of every stage.

    Raises:
        NotCuttableError: for a tensor or parameter that two stages would have to share.
    """
    return _Router(trace, stages).routes()


class Stages:
    """Assigns parts, and parameters outside of parts, to stages.

    Args:
        trace: of the full model.
        layers_per_stage: number of decoder layers of every stage.
        layers_name: FQN of their list.

    Raises:
        NotCuttableError: if the model does not call its parts in the order of the stages.
    """

    def __init__(self, trace: Trace, layers_per_stage: Sequence[int], layers_name: str) -> None:
        self.count, self._layers_name = len(layers_per_stage), layers_name
        self._of_layer = [stage for stage, layers in enumerate(layers_per_stage) for _ in range(layers)]
        self._last_layer = max((call.layer for call in trace.calls if call.layer is not None), default=-1)
        self._trace = trace
        self._of_parts: dict[str, set[int]] = {}
        for call in trace.calls:
            if call.name != OUTPUT:
                self._of_parts.setdefault(call.name, set()).add(self.of_call(call))
        for call, following in pairwise(trace.calls):
            if self.of_call(following) < self.of_call(call):
                raise NotCuttableError(f"it calls {following.name} after {call.name}, which is on a later stage")

    def after_layer(self, layer: int) -> int:
        """Return the stage of what runs after a layer, before the next; -1: before the first."""
        if layer < 0:
            return 0
        return self.count - 1 if layer == self._last_layer else self._of_layer[layer]

    def of_call(self, call: Call) -> int:
        """Return the stage that holds the part of a call."""
        return self.after_layer(call.after) if call.layer is None else self._of_layer[call.layer]

    def of_parts(self) -> dict[str, set[int]]:
        """Return name of a part -> the stages on which it is called."""
        return self._of_parts

    def of_parameter(self, name: str) -> int:
        """Return the stage that holds a parameter; the first, if the model does not use it.

        Raises:
            NotCuttableError: if it is outside of parts, and several stages use it.
        """
        layer = name.removeprefix(f"{self._layers_name}.").partition(".")[0]
        if name.startswith(f"{self._layers_name}.") and layer.isdecimal():
            return self._of_layer[int(layer)]
        for part, stages in self._of_parts.items():
            if name.startswith(f"{part}."):
                return min(stages)
        if name not in self._trace.first_used:
            return 0
        (first, _), (last, operator) = self._trace.first_used[name], self._trace.last_used[name]
        stage = self.after_layer(first)
        if self.after_layer(last) != stage:
            raise NotCuttableError(f"it uses {name} outside of its module, in {operator}, on more than one stage")
        return stage


class _Router:
    def __init__(self, trace: Trace, stages: Stages) -> None:
        self._trace, self._stages = trace, stages
        self._stage_of = [self._stages.of_call(call) for call in trace.calls]
        # Where each tensor passes, in order.
        self._places: dict[TensorKey, list[Place]] = {}
        for place, seen in _all_places(trace):
            self._places.setdefault(seen.key, []).append(place)
        # Values that a stage takes from its own forward pass, for later stages.
        self._captured: list[dict[Value, Seen]] = [{} for _ in range(self._stages.count)]
        self._needed: list[dict[Place, Value]] = [{} for _ in range(self._stages.count)]

    def routes(self) -> list[StageRoutes]:
        for stage in reversed(range(self._stages.count)):
            self._find_needs(stage)
        borders = [self._values_at(border) for border in range(self._stages.count + 1)]
        return [
            StageRoutes(
                own=frozenset(number for number, owner in enumerate(self._stage_of) if owner == stage),
                received=tuple(borders[stage]),
                placed={place: borders[stage].index(value) for place, value in self._needed[stage].items()},
                sent=tuple(
                    value.captured_at if value.producer == stage else borders[stage].index(value)
                    for value in borders[stage + 1]
                ),
                ends_at=self._last_call(stage),
            )
            for stage in range(self._stages.count)
        ]

    def _last_call(self, stage: int) -> int:
        own = (number for number, owner in enumerate(self._stage_of) if owner == stage)
        return max((*own, *(value.captured_at.call for value in self._captured[stage])), default=0)

    def _values_at(self, border: int) -> list[Value]:
        needed = (value for stage in range(border, self._stages.count) for value in self._needed[stage].values())
        return sorted({value for value in needed if value.producer < border}, key=_arrival)

    def _find_needs(self, stage: int) -> None:
        used = list(self._used_on(stage))
        wanted = [seen for _, seen in used] + list(self._captured[stage].values())
        whole: set[int] = set()
        for seen in wanted:
            foreign = self._foreign(seen, stage)
            if foreign and len(foreign) < len(seen.sources):
                # The code of the model computes it from results of this stage and of others.
                whole |= self._calls_of(foreign)
        for number in sorted(whole):
            self._receive_results(stage, number)
        for place, seen in used:
            foreign = self._foreign(seen, stage)
            if foreign and len(foreign) == len(seen.sources) and not foreign <= whole:
                self._need(stage, [place], seen, max(map(self._stage_of_source, foreign)))

    def _used_on(self, stage: int) -> Iterable[tuple[Place, Seen]]:
        for number, call in enumerate(self._trace.calls):
            if self._stage_of[number] == stage:
                for path, seen in call.inputs.items():
                    if seen.is_used or call.name == OUTPUT:
                        yield Place(number, "input", path), seen

    def _foreign(self, seen: Seen, stage: int) -> set[int | str]:
        return {source for source in seen.sources if self._stage_of_source(source) != stage}

    def _stage_of_source(self, source: int | str) -> int:
        return self._stages.of_parameter(source) if isinstance(source, str) else self._stage_of[source]

    def _calls_of(self, sources: Iterable[int | str]) -> set[int]:
        for source in sources:
            if isinstance(source, str):
                operator = self._trace.first_used[source][1]
                raise NotCuttableError(f"it uses {source} outside of its module, in {operator}, on more than one stage")
        return {source for source in sources if isinstance(source, int)}

    def _receive_results(self, stage: int, number: int) -> None:
        call = self._trace.calls[number]
        for side, leaves in (("output", call.outputs), ("written", call.written)):
            for path, seen in leaves.items():
                if seen.key.memory in self._trace.read:
                    place = Place(number, side, path)  # type: ignore[arg-type]
                    self._need(stage, [place], seen, self._stage_of[number], captured_at=place)

    def _need(
        self, stage: int, places: list[Place], seen: Seen, producer: int, captured_at: Place | None = None
    ) -> None:
        value = Value(captured_at or self._capture_place(seen, producer), producer)
        self._captured[producer][value] = seen
        self._needed[stage].update(dict.fromkeys(places, value))

    def _capture_place(self, seen: Seen, producer: int) -> Place:
        """Return where the stage that computes a tensor takes it: best as a result of its own."""
        places = self._places[seen.key]
        return next((it for it in places if it.side != "input" and self._stage_of[it.call] == producer), places[0])


def _arrival(value: Value) -> tuple[int, str, str]:
    place = value.captured_at
    # Paths mix names and numbers, which do not compare.
    return place.call, place.side, repr(place.path)


def _all_places(trace: Trace) -> Iterable[tuple[Place, Seen]]:
    for number, call in enumerate(trace.calls):
        for path, seen in call.inputs.items():
            yield Place(number, "input", path), seen
        for path, seen in call.outputs.items():
            yield Place(number, "output", path), seen
        for path, seen in call.written.items():
            yield Place(number, "written", path), seen
