"""Put the step of a process with many microbatches together from one with a few of them."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshtrain.compat.schedules import BACKWARD, WEIGHTS, Pass
from meshtrain.planning.simulation.profile import ROLES, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import Role


class MicrobatchesNeededError(Exception):
    """Raised if a step has too few microbatches to show what one with more does."""


class _Gradients(NamedTuple):
    """The gradients of a stage before a pass.

    FSDP2 adds new gradients to the sum of those before in the next backward pass, which only
    schedules with passes of weights do later.

    Attributes:
        are_new: whether there are new ones.
        are_summed: whether there is a sum.
    """

    are_new: bool
    are_summed: bool


def with_passes(few: RankProfile, number: int, passes: Sequence[Pass], stages: Mapping[int, int]) -> RankProfile:
    """Return the step of a process with like stages, and with another number of microbatches.

    The first and the last microbatches do what they do in the short step, and all others what the
    middle one does: FSDP2 gathers parameters in the first and reduces gradients in the last, and
    messages are awaited while another microbatch is computed.

    Args:
        few: the short step.
        number: of microbatches.
        passes: of that process.
        stages: its stage -> the stage of the short step that is like it.

    Raises:
        MicrobatchesNeededError: if a pass finds gradients as no pass of the short step does.
    """
    before, known, behind = few.parts()
    actions = [_scaled(action, few.num_microbatches, number) for action in before]
    last = {microbatch: index for index, (_, _, microbatch) in enumerate(passes)}
    middle = few.num_microbatches // 2
    extra = _left_by_middle(known, middle) if number > few.num_microbatches else 0
    found_in = _Likes(few.num_microbatches, list(known))
    for index, (it, gradients) in enumerate(zip(passes, _gradients(passes), strict=True)):
        like = found_in.like(it._replace(stage=stages[it.stage]), number, gradients)
        found = [action.of_pass(it.stage, it.microbatch) for action in known[like]]
        if extra and like.microbatch == middle and last[it.microbatch] == index:
            found[-1] = found[-1].with_change(-extra, Role.MESSAGES)
        actions += found
    messages = {work: times * number // few.num_microbatches for work, times in few.between_stages.items()}
    return RankProfile((*actions, *behind), number, Counter(messages))


class _Likes:
    """Finds the pass of a short step that does what a pass of another one does."""

    def __init__(self, num_microbatches: int, passes: Sequence[Pass]) -> None:
        self._number, self._middle = num_microbatches, num_microbatches // 2
        self._gradients = dict(zip(passes, _gradients(passes), strict=True))

    def like(self, wanted: Pass, number: int, gradients: _Gradients) -> Pass:
        """Return a pass of the short step.

        Args:
            wanted: the pass, with the stage of the short step.
            number: of microbatches.
            gradients: before the pass.

        Raises:
            MicrobatchesNeededError: if no pass finds such gradients.
        """
        usual = self._like(wanted.microbatch, number)
        others = range(1, self._number - 1) if 0 < usual < self._number - 1 else ()
        for microbatch in (usual, *sorted(others, key=lambda other: abs(other - self._middle))):
            found = wanted._replace(microbatch=microbatch)
            if self._gradients[found] == gradients:
                return found
        raise MicrobatchesNeededError

    def _like(self, microbatch: int, number: int) -> int:
        from_end = number - microbatch
        if from_end < self._number - self._middle:
            return self._number - from_end
        return min(microbatch, self._middle)


def _gradients(passes: Sequence[Pass]) -> Iterator[_Gradients]:
    """Yield the gradients of the stage before each pass of a process."""
    of_weights = {it._replace(phase=BACKWARD) for it in passes if it.phase == WEIGHTS}
    states: dict[int, _Gradients] = defaultdict(lambda: _Gradients(are_new=False, are_summed=False))
    for it in passes:
        state = states[it.stage]
        yield state
        if it.phase == WEIGHTS:
            states[it.stage] = state._replace(are_new=True)
        elif it.phase == BACKWARD:
            is_summed = state.are_summed or state.are_new or it not in of_weights
            states[it.stage] = _Gradients(are_new=False, are_summed=is_summed)


def _left_by_middle(known: Mapping[Pass, Sequence[ActionProfile]], middle: int) -> int:
    """Return the bytes of messages that the middle microbatch leaves.

    The memory of a message is allocated when it is awaited, while another microbatch is computed.
    Near the ends of a short step, that microbatch may be another one than in a long step. In a long
    step each frees as much as it allocates.
    """
    role = ROLES.index(Role.MESSAGES)
    found = (action for at, actions in known.items() if at.microbatch == middle for action in actions)
    return sum(int(action.by_role()[role]) for action in found)


def _scaled(action: ActionProfile, few: int, number: int) -> ActionProfile:
    """Return an action before the microbatches, with the batch of all of them."""
    scaled = action.changes * number // few
    return replace(action, changes=np.where(action.roles == ROLES.index(Role.BATCH), scaled, action.changes))
