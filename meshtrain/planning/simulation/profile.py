"""What one process does in a step."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from meshtrain.compat.schedules import Pass
from meshtrain.planning.simulation.recorder import HEAD, Change, Place, Recorder, Role, Work, total_work

ROLES = tuple(Role)
# Phases in which a microbatch goes forward.
FORWARD = ("forward", "after forward")
# The phase of a pass of the teacher before the passes of the model. It belongs to no stage of that.
AHEAD = "teacher forward"
# The messages between stages. A schedule sends them while it computes any other microbatch.
SEND = "send"
BETWEEN_STAGES = (SEND, "recv_")


@dataclass(frozen=True)
class ActionProfile:
    """The memory and the work of one action.

    Attributes:
        phase: as in `Activity`.
        stage: index of the pipeline stage, if one computes.
        microbatch: counted from 0, if one is computed.
        place: as in `Action`.
        changes: (events,) int64: bytes that begin or end.
        roles: (events,) index into `ROLES` of each change.
        work: as in `Action`, without messages between stages.
    """

    phase: str
    stage: int | None
    microbatch: int | None
    place: Place
    changes: np.ndarray
    roles: np.ndarray
    work: tuple[Counter[Work] | Work, ...]

    def of_pass(self, stage: int, microbatch: int) -> "ActionProfile":
        """Return the same action for another stage and microbatch."""
        # A reduction belongs to no microbatch.
        number = None if self.microbatch is None else microbatch
        if (stage, number) == (self.stage, self.microbatch):
            return self
        return ActionProfile(self.phase, stage, number, self.place, self.changes, self.roles, self.work)

    def with_change(self, num_bytes: int, role: Role) -> "ActionProfile":
        """Return the action with one more change at its end."""
        return replace(
            self,
            changes=np.append(self.changes, num_bytes),
            roles=np.append(self.roles, ROLES.index(role)),
        )

    def only(self, chosen: np.ndarray) -> "ActionProfile":
        """Return the action with some of its changes: where `chosen` (events,) is true."""
        return replace(self, changes=self.changes[chosen], roles=self.roles[chosen])

    def rounded(self, granularity: int) -> "ActionProfile":
        """Return the same with all memory in whole pieces of the allocator."""
        pieces = -(-np.abs(self.changes) // granularity)
        return replace(self, changes=np.sign(self.changes) * pieces * granularity)

    def by_role(self, end: int | None = None) -> np.ndarray:
        """Return (roles,) int64: the growth of each role up to an event; by default to the end."""
        totals = np.zeros(len(ROLES), dtype=np.int64)
        np.add.at(totals, self.roles[:end], self.changes[:end])
        return totals


@dataclass(frozen=True)
class RankProfile:
    """What one process does in a step.

    Passes that do the same may share their actions, which are then those of another stage and
    microbatch. Only `actions` has a copy for each pass.

    Attributes:
        before: what comes before the passes. The first action is what exists before the step.
        passes: the passes of microbatches through the stages of the process, in order. A reduction
            of the gradients of a stage belongs to the pass before it.
        behind: what follows.
        num_microbatches: of the step.
        between_stages: the messages between stages, in the whole step.
    """

    before: tuple[ActionProfile, ...]
    passes: Mapping[Pass, tuple[ActionProfile, ...]]
    behind: tuple[ActionProfile, ...]
    num_microbatches: int
    between_stages: Counter[Work]

    @classmethod
    def of_actions(cls, actions: Iterable[ActionProfile], num_microbatches: int, between_stages: Counter[Work]) -> Self:
        """Return the profile of a step from its actions, in order."""
        before: list[ActionProfile] = []
        behind: list[ActionProfile] = []
        passes: dict[Pass, list[ActionProfile]] = {}
        for action in actions:
            if action.stage is None:
                (behind if passes else before).append(action)
                continue
            if action.microbatch is not None:
                latest = Pass(action.phase.removeprefix("after "), action.stage, action.microbatch)
            passes.setdefault(latest, []).append(action)
        found = {it: tuple(of_pass) for it, of_pass in passes.items()}
        return cls(tuple(before), found, tuple(behind), num_microbatches, between_stages)

    @cached_property
    def actions(self) -> tuple[ActionProfile, ...]:
        """Return all actions, in order."""
        passes = (action.of_pass(at.stage, at.microbatch) for at, found in self.passes.items() for action in found)
        return (*self.before, *passes, *self.behind)

    def sections(self) -> list[tuple[ActionProfile, ...]]:
        """Return the same, in parts that passes share: before the passes, each one, the rest."""
        return [self.before, *self.passes.values(), self.behind]

    def work(self) -> Counter[Work]:
        """Return how often each kind of operator runs in the step."""
        sections = self.sections()
        times = Counter(map(id, sections))
        total = Counter(self.between_stages)
        for section in {id(section): section for section in sections}.values():
            for work, number in total_work(work for action in section for work in action.work).items():
                total[work] += number * times[id(section)]
        return total

    def rounded(self, granularity: int) -> Self:
        """Return the same with all memory in whole pieces of the allocator.

        Args:
            granularity: of the allocator in bytes.
        """
        before, behind = (_rounded(actions, granularity) for actions in (self.before, self.behind))
        passes = {at: _rounded(actions, granularity) for at, actions in self.passes.items()}
        return replace(self, before=before, passes=passes, behind=behind)


def _rounded(actions: Iterable[ActionProfile], granularity: int) -> tuple[ActionProfile, ...]:
    return tuple(action.rounded(granularity) for action in actions)


def profile_of(recorder: Recorder, num_microbatches: int) -> RankProfile:
    """Return the profile of the step that a recorder has seen."""
    ends = {
        change.storage: action.section
        for action in recorder.actions
        for change in action.changes
        if change.num_bytes < 0
    }
    phases = {action.section: action.phase for action in recorder.actions}
    actions = [
        ActionProfile(
            action.phase,
            action.stage,
            action.microbatch,
            action.place,
            np.array([change.num_bytes for change in action.changes], dtype=np.int64),
            np.array([_role_index(recorder, change, ends, phases) for change in action.changes], dtype=np.int64),
            tuple(work for work in action.work if not _is_between_stages(work)),
        )
        for action in recorder.actions
    ]
    between = (work for action in recorder.actions for work in action.work if _is_between_stages(work))
    return RankProfile.of_actions(actions, num_microbatches, total_work(between))


def _is_between_stages(work: Counter[Work] | Work) -> bool:
    return isinstance(work, Work) and work.name in BETWEEN_STAGES


def _role_index(recorder: Recorder, change: Change, ends: Mapping[int, int], phases: Mapping[int, str]) -> int:
    """Return the index in `ROLES` of what a piece of memory is for.

    Args:
        ends: number of a storage -> number of the section in which it ended last.
        phases: number of a section -> its phase.
    """
    role = recorder.roles.get(change.storage)
    if role is None and change.place == HEAD:
        role = Role.LOSS
    if role is None:
        outlives = ends.get(change.storage, change.section + 1) > change.section
        is_kept = phases[change.section] in (*FORWARD, AHEAD) and outlives
        role = Role.ACTIVATIONS if is_kept else Role.TEMPORARY
    return ROLES.index(role)
