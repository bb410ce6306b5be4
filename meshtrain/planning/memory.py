"""The memory of a process over a step: its peak, when it comes, and what it consists of."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.planning.simulation.profile import ROLES, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import HEAD, START, Place, Role

# With `shard.offload = "cpu"` they are in host memory.
OFFLOADED = (Role.PARAMETERS, Role.OPTIMIZER, Role.GRADIENTS)


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
    level = np.zeros(len(ROLES), dtype=np.int64)
    peak, host, gradients = -1, 0, 0
    at_peak, moment = level, Moment(START, None, None, None)
    for action in profile.actions:
        here = np.where(away[action.roles], 0, action.changes)
        rises = int(level[~away].sum()) + here.cumsum()
        if len(rises) and rises.max() > peak:
            index = int(rises.argmax())
            peak = int(rises[index])
            at_peak = level + action.by_role(index + 1)
            moment = moment_of(action)
        level = level + action.by_role()
        host = max(host, int(level[away].sum()))
        gradients = max(gradients, int(level[ROLES.index(Role.GRADIENTS)]))
    held = {role: int(size) for role, size, is_away in zip(ROLES, at_peak, away, strict=True) if size and not is_away}
    return MemoryUse(peak, held, moment, gradients, host)
