"""The times of the phases of some steps, without a profiler."""

import socket
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from meshtrain.pictures.timeline import Kind, Span
from meshtrain.runtime.activity import Activity
from meshtrain.runtime.agreement import gather_objects
from meshtrain.training.step import Mark, mark

LAST_PHASE = "hooks"
"""With this phase, a step is over."""
BACKWARD, WEIGHTS = "backward", "backward of weights"
KINDS: dict[str, Kind] = {
    "before passes": "wait",
    "forward": "forward",
    BACKWARD: "backward",
    WEIGHTS: "weight gradient",
    "reduction": "gradients",
    "gradients": "gradients",
    "optimizer": "optimizer",
}


class Phase(NamedTuple):
    """The begin of a phase of a step.

    Attributes:
        name: as in `Activity`.
        stage: index of the pipeline stage, if one computes.
        microbatch: counted from 0, if one is computed.
        begin_seconds: on a clock that all processes share.
    """

    name: str
    stage: int | None
    microbatch: int | None
    begin_seconds: float


class Stopwatch:
    """Listens to an activity, and marks when each phase begins.

    On a GPU the marks are events in its queue. To make one is collective.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[int, list[tuple[str, int | None, int | None, Mark]]] = {}
        self._origin, self._shift = _common_origin(device)

    def __call__(self, activity: Activity) -> None:
        """Mark the begin of a phase."""
        if activity.step is not None:
            entered = activity.phase, activity.stage, activity.microbatch, mark(self._device)
            self._marks.setdefault(activity.step, []).append(entered)

    def spans(self, step: int) -> list[Span]:
        """Return what this process did in a step. The device must have reached its end."""
        marks = self._marks[step]
        first = marks[0][-1]
        begin = self._origin.seconds_until(first) + self._shift
        phases = []
        for name, stage, microbatch, reached in marks:
            phases.append(Phase(name, stage, microbatch, begin + first.seconds_until(reached)))
            if name == LAST_PHASE:
                break
        return spans_of(phases)


def spans_of(phases: Sequence[Phase]) -> list[Span]:
    """Return the spans of phases that follow each other.

    Args:
        phases: in order. The last one only ends the one before.
    """
    split = {(phase.stage, phase.microbatch) for phase in phases if phase.name == WEIGHTS}
    spans: list[Span] = []
    for phase, following in pairwise(phases):
        is_split = phase.name == BACKWARD and (phase.stage, phase.microbatch) in split
        kind: Kind = "input gradient" if is_split else _kind(phase.name)
        before = spans[-1] if spans else None
        if before is not None and phase.microbatch is None and before.microbatch is None and before.kind == kind:
            spans[-1] = Span(kind, before.begin_seconds, following.begin_seconds, before.stage)
        elif _is_pass(phase.name):
            spans.append(Span(kind, phase.begin_seconds, following.begin_seconds, phase.stage, phase.microbatch))
        else:
            spans.append(Span(kind, phase.begin_seconds, following.begin_seconds))
    return spans


def _is_pass(phase: str) -> bool:
    return phase in ("forward", BACKWARD, WEIGHTS)


def _kind(phase: str) -> Kind:
    # After a pass, the schedule sends its result, and waits for what the next one needs.
    return "wait" if phase.startswith("after ") else KINDS.get(phase, "other")


def _common_origin(device: torch.device) -> tuple[Mark, float]:
    """Return a mark, and what must be added to the times since then. Collective.

    The processes of a machine share a clock. Clocks of different machines are set by the moment at
    which all processes have met.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gather_objects(None)
    origin, host = mark(device), socket.gethostname()
    first = next(seconds for name, seconds in gather_objects((host, origin.host_seconds)) if name == host)
    return origin, origin.host_seconds - first
