"""Put the step of a process with many layers together from one with a few of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np

from meshtrain.planning.assembly.growth import STATE, Outside
from meshtrain.planning.simulation.fewer_layers import LayersNeededError
from meshtrain.planning.simulation.profile import ROLES, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import HEAD


def with_all_layers(few: RankProfile, outside: Outside, likes: Mapping[int, Sequence[int]]) -> RankProfile:
    """Return the step of a process with all of its layers.

    Args:
        few: the step with a few layers.
        outside: what a process with all layers does outside the passes of microbatches.
        likes: stage -> for each of its layers, the one of the few that does the same.

    Raises:
        LayersNeededError: if it is not known what a single layer does.
    """
    before = (_with_state(few.before[0], outside.state), *few.before[1:])
    passes = {at: tuple(_with_layers(found, likes[at.stage])) for at, found in few.passes.items()}
    return replace(few, before=before, passes=passes, behind=outside.behind)


def _with_state(start: ActionProfile, state: ActionProfile) -> ActionProfile:
    """Return what exists before a step, with the state of another number of layers."""
    others = ~np.isin(start.roles, [ROLES.index(role) for role in STATE])
    return replace(
        start,
        changes=np.concatenate([state.changes, start.changes[others]]),
        roles=np.concatenate([state.roles, start.roles[others]]),
    )


def _with_layers(actions: Sequence[ActionProfile], likes: Sequence[int]) -> list[ActionProfile]:
    """Return a pass of a microbatch through all layers of a stage."""
    if list(likes) == list(range(len(likes))):
        return list(actions)
    found: list[ActionProfile] = []
    for phase, group in groupby(actions, key=lambda action: action.phase):
        part = list(group)
        found += part if _is_outside_layers(phase, part) else _phase_with_layers(part, likes)
    return found


def _is_outside_layers(phase: str, actions: Sequence[ActionProfile]) -> bool:
    """Return whether a phase does nothing in layers."""
    # Without FSDP2, nothing is reduced after the passes of one of several stages.
    is_quiet = phase == "reduction" and not any(any(action.work) or len(action.changes) for action in actions)
    is_behind = phase.startswith("after ") and all(action.place in (None, HEAD) for action in actions)
    return is_quiet or is_behind


def _phase_with_layers(actions: list[ActionProfile], likes: Sequence[int]) -> list[ActionProfile]:
    ends = [end for end, action in enumerate(actions, start=1) if isinstance(action.place, int)]
    places = [actions[end - 1].place for end in ends]
    order = range(len(likes))
    if places == sorted(places, reverse=True):  # type: ignore[type-var]
        order = order[::-1]
    if sorted(places) != list(range(len(places))) or not {*likes} <= {*places}:  # type: ignore[type-var]
        raise LayersNeededError(f"in the {actions[0].phase} pass its layers run in the order {places}")
    # What is between two layers belongs to the second one.
    units = {place: actions[begin:end] for place, (begin, end) in zip(places, pairwise([0, *ends]), strict=True)}
    found = [_moved(action, index) for index in order for action in units[likes[index]]]
    return [*found, *actions[ends[-1] :]]


def _moved(action: ActionProfile, place: int) -> ActionProfile:
    return replace(action, place=place) if isinstance(action.place, int) else action
