"""The memory of a process over a step: its peak, when it comes, and what it consists of."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshtrain.planning.simulation.profile import ROLES, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import HEAD, Place, Role

# With `shard.offload = "cpu"` they are in host memory.
OFFLOADED = (Role.PARAMETERS, Role.OPTIMIZER, Role.GRADIENTS, Role.TEACHER)


@dataclass(frozen=True)
class Moment:
    """A point in a step.

    Attributes:
        phase: forward, backward, optimizer and so on.
        stage: index of the pipeline stage, if one computes.
        microbatch: counted from 0, if one is computed.
        place: as in `Action`.
    """

    phase: str
    stage: int | None
    microbatch: int | None
    place: Place

    def described(self, first_layers: Sequence[int]) -> str:
        """Return the moment as "forward of microbatch 3, stage 0, layer 5".

        Args:
            first_layers: index of the first layer of each stage.
        """
        words = [self.phase if self.microbatch is None else f"{self.phase} of microbatch {self.microbatch}"]
        if self.stage is not None:
            words.append(f"stage {self.stage}")
        if self.place == HEAD:
            words.append("head and loss")
        elif self.place is not None and self.stage is not None:
            words.append(f"layer {first_layers[self.stage] + self.place}")
        return ", ".join(words)


@dataclass(frozen=True)
class MemoryUse:
    """The memory of one process over a step.

    Attributes:
        peak_bytes: the most on its device at once.
        at_peak: role -> bytes on its device, at the peak.
        moment: when the peak comes.
        gradient_bytes: of the complete gradients, which the optimizer reads.
        host_bytes: the most in host memory, with offloading.
    """

    peak_bytes: int
    at_peak: dict[Role, int]
    moment: Moment
    gradient_bytes: int
    host_bytes: int


def moment_of(action: ActionProfile) -> Moment:
    """Return when an action happens."""
    return Moment(action.phase, action.stage, action.microbatch, action.place)


def held_elsewhere(*, offloads: bool) -> np.ndarray:
    """Return (roles,) bool: whether memory of a role is not on the device.

    Args:
        offloads: whether parameters, gradients and optimizer state are in host memory.
    """
    return np.isin(np.arange(len(ROLES)), [ROLES.index(role) for role in OFFLOADED if offloads])


def memory_use(profile: RankProfile, *, offloads: bool = False) -> MemoryUse:
    """Return the memory of one process over a step.

    Args:
        profile: of the process.
        offloads: whether parameters, gradients and optimizer state are in host memory.
    """
    away = held_elsewhere(offloads=offloads)
    sections = profile.sections()
    # The passes of most microbatches share what they do.
    distinct = {id(section): _growth_of(section, away) for section in {id(it): it for it in sections}.values()}
    level, peak, at = 0, -1, 0
    on_host, host, gradients, most_gradients = 0, 0, 0, 0
    for index, it in enumerate(map(distinct.__getitem__, map(id, sections))):
        if it.highest is not None and level + it.highest > peak:
            peak, at = level + it.highest, index
        host, most_gradients = max(host, on_host + it.most_on_host), max(most_gradients, gradients + it.most_gradients)
        level += it.on_device
        on_host += it.on_host
        gradients += it.gradients
    fullest = distinct[id(sections[at])]
    at_peak = fullest.at_highest + sum(
        (times * distinct[key].by_role for key, times in Counter(map(id, sections[:at])).items()),
        np.zeros(len(ROLES), dtype=np.int64),
    )
    action = sections[at][fullest.highest_action]
    if 0 < at <= len(profile.passes):
        shown = [*profile.passes][at - 1]
        action = action.of_pass(shown.stage, shown.microbatch)
    held = {role: int(size) for role, size, is_away in zip(ROLES, at_peak, away, strict=True) if size and not is_away}
    return MemoryUse(peak, held, moment_of(action), most_gradients, host)


class _Growth(NamedTuple):
    """What some actions change.

    Attributes:
        highest: the most that the device holds during them, more than before; None without a
            change.
        highest_action: index of the action during which it holds that.
        at_highest: (roles,) int64: growth of each role until then.
        by_role: (roles,) int64: growth of each role until the end.
        on_device: growth on the device.
        on_host: growth in host memory.
        most_on_host: the largest growth in host memory after one of the actions, or 0.
        gradients: growth of the gradients.
        most_gradients: the largest growth of the gradients after one of the actions, or 0.
    """

    highest: int | None
    highest_action: int
    at_highest: np.ndarray
    by_role: np.ndarray
    on_device: int
    on_host: int
    most_on_host: int
    gradients: int
    most_gradients: int


def _growth_of(actions: Sequence[ActionProfile], away: np.ndarray) -> _Growth:
    gradients_at = ROLES.index(Role.GRADIENTS)
    by_role = np.zeros(len(ROLES), dtype=np.int64)
    highest, highest_action, at_highest = None, 0, by_role
    most_on_host, most_gradients = 0, 0
    for index, action in enumerate(actions):
        if len(action.changes):
            rises = np.where(away[action.roles], 0, action.changes).cumsum() + by_role[~away].sum()
            end = int(rises.argmax())
            if highest is None or rises[end] > highest:
                highest, highest_action, at_highest = int(rises[end]), index, by_role + action.by_role(end + 1)
        by_role = by_role + action.by_role()
        most_on_host = max(most_on_host, int(by_role[away].sum()))
        most_gradients = max(most_gradients, int(by_role[gradients_at]))
    on_device, on_host = int(by_role[~away].sum()), int(by_role[away].sum())
    return _Growth(
        highest,
        highest_action,
        at_highest,
        by_role,
        on_device,
        on_host,
        most_on_host,
        int(by_role[gradients_at]),
        most_gradients,
    )
