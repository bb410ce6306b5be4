"""The memory of a process over a step, at a number of moments that can be drawn."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np

from meshtrain.compat.schedules import BACKWARD, FORWARD, WEIGHTS
from meshtrain.pictures.memory import MemoryCurve, Moment
from meshtrain.pictures.timeline import Kind, Lane
from meshtrain.planning.memory import held_elsewhere, moment_of
from meshtrain.planning.simulation.profile import ROLES, ActionProfile, RankProfile
from meshtrain.planning.tables import by_column

PARTS = 240
"""Number of equal parts of the step, of each of which the fullest moment is drawn."""
PHASES: dict[Kind, str] = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "input gradient": BACKWARD,
    "weight gradient": WEIGHTS,
}
_Section = tuple[str, int | None, int | None]
"""Phase or kind of a span, stage, microbatch."""


def memory_curve(
    name: str,
    profile: RankProfile,
    lane: Lane | None,
    first_layers: Sequence[int],
    *,
    seconds: float = 0.0,
    offloads: bool,
    limit_bytes: int,
) -> MemoryCurve:
    """Return the memory of a process over a step.

    Args:
        name: of the process.
        profile: of the process.
        lane: when it does what; None if this is not known.
        first_layers: index of the first layer of each stage.
        seconds: of the step, if they are known.
        offloads: whether parameters, gradients and optimizer state are in host memory.
        limit_bytes: that tensors may take.
    """
    positions = _by_action(profile) if lane is None else _by_time(profile, lane)
    end = float(len(profile.actions)) if lane is None else seconds
    moments = tuple(_moments(profile, positions, end, first_layers, offloads=offloads))
    return MemoryCurve(name, moments, end, "actions" if lane is None else "seconds", limit_bytes, "limit for tensors")


def _by_action(profile: RankProfile) -> list[np.ndarray]:
    """Return for each action but the first the positions of its changes: its index, and parts."""
    return [
        index + np.linspace(0, 1, len(action.changes), endpoint=False)
        for index, action in enumerate(profile.actions[1:], start=1)
    ]


def _by_time(profile: RankProfile, lane: Lane) -> list[np.ndarray]:
    """Return for each action but the first the times of its changes.

    The begin and the end of each pass are known. The changes are spread evenly between them.
    """
    spans = {_section_of(span.kind, span.stage, span.microbatch): span for span in lane.spans}
    found: list[np.ndarray] = []
    now = 0.0
    for section, group in groupby(_with_sections(profile.actions[1:]), key=lambda item: item[0]):
        lengths = [len(action.changes) for _, action in group]
        begin, end = (spans[section].begin_seconds, spans[section].end_seconds) if section in spans else (now, now)
        now = end
        times = np.linspace(begin, end, sum(lengths), endpoint=False)
        found += np.split(times, np.cumsum(lengths)[:-1])
    return found


def _section_of(kind: Kind, stage: int | None, microbatch: int | None) -> _Section:
    return PHASES.get(kind, kind), stage, microbatch


def _with_sections(actions: Sequence[ActionProfile]) -> Iterator[tuple[_Section, ActionProfile]]:
    """Yield each action with the section of the timeline that it belongs to."""
    around = "other"
    for action in actions:
        if action.stage is None or action.microbatch is None:
            yield ("optimizer" if action.phase == "optimizer" else around, None, None), action
        else:
            around = "gradients"
            yield (action.phase.removeprefix("after "), action.stage, action.microbatch), action


def _moments(
    profile: RankProfile,
    positions: Sequence[np.ndarray],
    end: float,
    first_layers: Sequence[int],
    *,
    offloads: bool,
) -> Iterator[Moment]:
    """Yield the fullest moment of each part of the step, if it differs from the one before."""
    away = held_elsewhere(offloads=offloads)
    start, *actions = profile.actions
    roles = np.concatenate([action.roles for action in actions])
    changes = np.where(away[roles], 0, np.concatenate([action.changes for action in actions]))
    owners = np.repeat(np.arange(1, len(actions) + 1), [len(action.changes) for action in actions])
    borders = np.searchsorted(np.concatenate(positions), np.linspace(0, end, PARTS + 1)[1:-1])
    level = np.where(away, 0, start.by_role())
    owner, before = 0, dict[str, int]()
    for part, (begin, behind) in enumerate(pairwise([0, *borders.tolist(), len(changes)])):
        rises = changes[begin:behind].cumsum()
        last = int(rises.argmax()) if len(rises) and rises.max() > 0 else -1
        fullest = _grown(level, roles[begin : begin + last + 1], changes[begin : begin + last + 1])
        sizes = by_column(dict(zip(ROLES, fullest.tolist(), strict=True)))
        if sizes != before:
            action = profile.actions[int(owners[begin + last]) if last >= 0 else owner]
            yield Moment(part * end / PARTS, moment_of(action).described(first_layers), sizes)
        before = sizes
        level = _grown(level, roles[begin:behind], changes[begin:behind])
        owner = int(owners[behind - 1]) if behind else owner


def _grown(level: np.ndarray, roles: np.ndarray, changes: np.ndarray) -> np.ndarray:
    """Return the bytes of each role after some changes."""
    grown = level.copy()
    np.add.at(grown, roles, changes)
    return grown
