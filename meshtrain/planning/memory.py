"""The memory of a process over a step: its peak, when it comes, and what it consists of."""

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
    gradients_at = ROLES.index(Role.GRADIENTS)
    # The passes of most microbatches have the same changes.
    known: dict[tuple[int, int], _Changes] = {}
    changes = []
    for action in profile.actions:
        key = id(action.changes), id(action.roles)
        if key not in known:
            known[key] = _changes_of(action, away)
        changes.append(known[key])
    level, peak, at = 0, -1, 0
    on_host, host, gradients, most_gradients = 0, 0, 0, 0
    for index, it in enumerate(changes):
        if it.highest is not None and level + it.highest > peak:
            peak, at = level + it.highest, index
        level += it.on_device
        on_host += it.on_host
        gradients += it.by_role[gradients_at]
        host, most_gradients = max(host, on_host), max(most_gradients, gradients)
    before = sum((np.array(it.by_role) for it in changes[:at]), np.zeros(len(ROLES), dtype=np.int64))
    highest = profile.actions[at]
    at_peak = before + highest.by_role(changes[at].end)
    moment = moment_of(highest)
    held = {role: int(size) for role, size, is_away in zip(ROLES, at_peak, away, strict=True) if size and not is_away}
    return MemoryUse(peak, held, moment, most_gradients, host)


class _Changes(NamedTuple):
    """What an action changes.

    Attributes:
        highest: the most that its device holds during it, more than before; None without a change.
        end: number of changes until then.
        on_device: growth on the device.
        on_host: growth in host memory.
        by_role: growth of each role.
    """

    highest: int | None
    end: int
    on_device: int
    on_host: int
    by_role: tuple[int, ...]


def _changes_of(action: ActionProfile, away: np.ndarray) -> _Changes:
    rises = np.where(away[action.roles], 0, action.changes).cumsum()
    end = int(rises.argmax()) if len(rises) else 0
    by_role = action.by_role()
    highest = int(rises[end]) if len(rises) else None
    return _Changes(highest, end + 1, int(by_role[~away].sum()), int(by_role[away].sum()), tuple(by_role.tolist()))
