"""What the processes of a run do in a step, and when: predicted or measured."""

from dataclasses import dataclass
from typing import Any, Literal, Self

Kind = Literal[
    "forward", "backward", "input gradient", "weight gradient", "send", "wait", "gradients", "optimizer", "other"
]
"""`backward` is input and weight gradient in one pass. `gradients` completes and reduces them."""
WAITS: tuple[Kind, ...] = ("wait", "send")
"""Kinds of spans in which a process waits for others."""


@dataclass(frozen=True)
class Span:
    """A section of time in which a process does one thing.

    Attributes:
        kind: what it does.
        begin_seconds: since the begin of the step.
        end_seconds: since the begin of the step.
        stage: index of the pipeline stage, if one computes.
        microbatch: counted from 0, if one is computed.
    """

    kind: Kind
    begin_seconds: float
    end_seconds: float
    stage: int | None = None
    microbatch: int | None = None


@dataclass(frozen=True)
class Lane:
    """The spans of one process, in order and without overlap.

    Attributes:
        name: of the process or processes, such as "ranks 0-7".
    """

    name: str
    spans: tuple[Span, ...]

    @property
    def busy_seconds(self) -> float:
        """Return the time in which the process does not wait."""
        return sum(span.end_seconds - span.begin_seconds for span in self.spans if span.kind not in WAITS)


@dataclass(frozen=True)
class Timeline:
    """What the processes of a run do in one step."""

    lanes: tuple[Lane, ...]

    @property
    def seconds(self) -> float:
        """Return the end of the last span."""
        return max((span.end_seconds for lane in self.lanes for span in lane.spans), default=0.0)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the timeline as lists and dictionaries that `json` writes."""
        return [
            {
                "name": lane.name,
                "spans": [
                    [s.kind, round(s.begin_seconds, 9), round(s.end_seconds, 9), s.stage, s.microbatch]
                    for s in lane.spans
                ],
            }
            for lane in self.lanes
        ]

    @classmethod
    def from_json(cls, values: list[dict[str, Any]]) -> Self:
        """Return the timeline that `to_json` has described."""
        return cls(tuple(Lane(lane["name"], tuple(Span(*span) for span in lane["spans"])) for lane in values))


def bubble(timeline: Timeline) -> float:
    """Return the share of the time in which processes wait for others, on average.

    A process waits in spans of the kinds `WAITS`, and where it has no span. One process alone waits
    for nobody.
    """
    whole = timeline.seconds * len(timeline.lanes)
    if len(timeline.lanes) < 2 or not whole:
        return 0.0
    return 1 - sum(lane.busy_seconds for lane in timeline.lanes) / whole
