"""Put the step of a process with many microbatches together from one with a few of them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshtrain.compat.schedules import BACKWARD, WEIGHTS, Pass
from meshtrain.planning.simulation.profile import AHEAD, ROLES, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import Role

# The phases of a reduction after the last pass of a stage.
REDUCTION = ("reduction", "after reduction")


class _Effect(NamedTuple):
    """What decides what a pass does with the gradients of its stage.

    FSDP2 adds new gradients to the sum of those before in the next backward pass, which only
    schedules with passes of weights do later.

    Attributes:
        has_weights: whether the pass computes gradients of weights.
        finds_new: whether there are gradients that are not in the sum.
        finds_sum: whether there is a sum, for a pass that adds to it.
    """

    has_weights: bool = False
    finds_new: bool = False
    finds_sum: bool = False


def with_passes(few: RankProfile, number: int, passes: Sequence[Pass], stages: Mapping[int, int]) -> RankProfile:
    """Return the step of a process with like stages, and with another number of microbatches.

    The first and the last microbatches do what they do in the short step, and all others what the
    middle one does: FSDP2 gathers parameters in the first and reduces gradients in the last, and
    messages are awaited while another microbatch is computed. If such a microbatch treats gradients
    differently, another one counts.

    Args:
        few: the short step. It shows all passes (`shows_all`).
        number: of microbatches.
        passes: of that process.
        stages: its stage -> the stage of the short step that is like it.
    """
    before, with_reductions, behind = few.parts()
    known = {it: [action for action in found if action.phase not in REDUCTION] for it, found in with_reductions.items()}
    middle = few.num_microbatches // 2
    extra = _left_by_middle(known, middle) if number > few.num_microbatches else 0
    ends_microbatch = {it.microbatch: index for index, it in enumerate(passes)}
    ends_stage = {it.stage: index for index, it in enumerate(passes)}
    likes = _Likes(few.num_microbatches, list(known))
    actions = [_scaled(action, few.num_microbatches, number) for action in _with_ahead(before, few, number)]
    for index, (it, effect) in enumerate(zip(passes, _effects(passes), strict=True)):
        like = likes.like(it._replace(stage=stages[it.stage]), number, effect)
        found = [action.of_pass(it.stage, it.microbatch) for action in known[like]]
        if extra and like.microbatch == middle and ends_microbatch[it.microbatch] == index:
            found[-1] = found[-1].with_change(-extra, Role.MESSAGES)
        actions += found
        if ends_stage[it.stage] == index:
            actions += [action.of_pass(it.stage, it.microbatch) for action in _reduction(with_reductions, like.stage)]
    messages = {work: times * number // few.num_microbatches for work, times in few.between_stages.items()}
    return RankProfile((*actions, *behind), number, Counter(messages))


def shows_all(few: Sequence[Pass], passes: Sequence[Pass], stages: Mapping[int, int]) -> bool:
    """Return whether the passes of a short step treat gradients in all ways of another one.

    Args:
        few: the passes of a process in the short step.
        passes: those of a like process in the other one.
        stages: its stage -> the stage of the short step that is like it.
    """
    shown = {(it.phase, it.stage, effect) for it, effect in zip(few, _effects(few), strict=True)}
    wanted = {(it.phase, stages[it.stage], effect) for it, effect in zip(passes, _effects(passes), strict=True)}
    return wanted <= shown


def _reduction(known: Mapping[Pass, Sequence[ActionProfile]], stage: int) -> list[ActionProfile]:
    """Return the reduction of the gradients of a stage, if it follows the last pass."""
    found = (actions for at, actions in known.items() if at.stage == stage)
    return [action for actions in found for action in actions if action.phase in REDUCTION]


class _Likes:
    """Finds the pass of a short step that does what a pass of another one does."""

    def __init__(self, num_microbatches: int, passes: Sequence[Pass]) -> None:
        self._number, self._middle = num_microbatches, num_microbatches // 2
        self._effects = dict(zip(passes, _effects(passes), strict=True))
        self._others = sorted(range(num_microbatches), key=lambda other: abs(other - self._middle))

    def like(self, wanted: Pass, number: int, effect: _Effect) -> Pass:
        """Return a pass of the short step.

        Args:
            wanted: the pass, with the stage of the short step.
            number: of microbatches.
            effect: of the pass.
        """
        near = (wanted._replace(microbatch=it) for it in (self._like(wanted.microbatch, number), *self._others))
        return next(it for it in near if self._effects.get(it) == effect)

    def _like(self, microbatch: int, number: int) -> int:
        from_end = number - microbatch
        if from_end < self._number - self._middle:
            return self._number - from_end
        return min(microbatch, self._middle)


def _effects(passes: Sequence[Pass]) -> Iterator[_Effect]:
    """Yield what each pass of a process does with gradients."""
    split = {it._replace(phase=BACKWARD) for it in passes if it.phase == WEIGHTS}
    with_new, with_sum = set[int](), set[int]()
    for it in passes:
        new, summed = it.stage in with_new, it.stage in with_sum
        if it.phase == WEIGHTS:
            yield _Effect(has_weights=True, finds_new=new)
            with_new.add(it.stage)
        elif it.phase == BACKWARD and (new or it not in split):
            yield _Effect(it not in split, new, summed)
            with_new.discard(it.stage)
            with_sum.add(it.stage)
        else:
            yield _Effect()


def _left_by_middle(known: Mapping[Pass, Sequence[ActionProfile]], middle: int) -> int:
    """Return the bytes of messages that the middle microbatch leaves.

    The memory of a message is allocated when it is awaited, while another microbatch is computed.
    Near the ends of a short step, that microbatch may be another one than in a long step. In a long
    step each frees as much as it allocates.
    """
    role = ROLES.index(Role.MESSAGES)
    found = (action for at, actions in known.items() if at.microbatch == middle for action in actions)
    return sum(int(action.by_role()[role]) for action in found)


def _with_ahead(before: Sequence[ActionProfile], few: RankProfile, number: int) -> list[ActionProfile]:
    """Return what comes before the passes, with the teacher's passes of all microbatches.

    As for other passes, the middle microbatch stands for all but the first and the last ones.

    Args:
        before: the same in the short step.
        few: the short step.
        number: of microbatches.
    """
    ahead = [index for index, action in enumerate(before) if action.phase == AHEAD]
    more = number - few.num_microbatches
    if not ahead or not more:
        return list(before)
    middles = ahead[few.num_microbatches // 2 :: few.num_microbatches]
    found: list[ActionProfile] = []
    for index, action in enumerate(before):
        found += [action] * (1 + more if index in middles else 1)
        if index == ahead[-1]:
            # What is not kept for the loss of a microbatch is freed at the end.
            grown = more * np.sum([before[middle].by_role() for middle in middles], axis=0)
            kept = more * np.sum([before[it].by_role() for it in ahead], axis=0) // few.num_microbatches
            for role, size in zip(ROLES, grown - kept, strict=True):
                found[-1] = found[-1].with_change(-int(size), role) if size else found[-1]
    return found


def _scaled(action: ActionProfile, few: int, number: int) -> ActionProfile:
    """Return an action before the microbatches, with the batch of all of them."""
    scaled = action.changes * number // few
    return replace(action, changes=np.where(action.roles == ROLES.index(Role.BATCH), scaled, action.changes))
