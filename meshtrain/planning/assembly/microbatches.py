"""Put the step of a process with many microbatches together from one with a few of them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from meshtrain.compat.schedules import Instruction, Pass
from meshtrain.planning.assembly.effects import Effect, Gathering, effects
from meshtrain.planning.assembly.received import Kind, Received, kinds_received, kinds_told_apart
from meshtrain.planning.simulation.profile import AHEAD, ROLES, SEND, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import Role, Work

# The phases of a reduction after the last pass of a stage.
REDUCTION = ("reduction", "after reduction")


def with_passes(
    few: RankProfile,
    few_program: Sequence[Instruction],
    number: int,
    program: Sequence[Instruction],
    stages: Mapping[int, int],
    gathering: Gathering,
) -> RankProfile:
    """Return the step of a process with like stages, and with another number of microbatches.

    The first and the last microbatch do what they do in the short step, and all others what the
    middle one does: FSDP2 gathers parameters in the first and reduces gradients in the last. If
    such a microbatch treats gradients or parameters differently, another one counts. The memory for
    messages between stages is allocated where the long step does it.

    Args:
        few: the short step. It shows what all passes do (`Ways.are_shown_by`).
        few_program: what its process does.
        number: of microbatches.
        program: what the process does.
        stages: its stage -> the stage of the short step that is like it.
        gathering: of the plan.
    """
    short = _ShortStep(few, few_program, gathering)
    passes = passes_of(program)
    at_first, *received = (_of_stages(kinds, stages) for kinds in kinds_received(program))
    ends_stage = {it.stage: index for index, it in enumerate(passes)}
    found: dict[Pass, tuple[ActionProfile, ...]] = {}
    for index, (it, effect, kinds) in enumerate(zip(passes, effects(passes, gathering), received, strict=True)):
        like = short.like(Pass(it.phase, stages[it.stage], it.microbatch), number, effect)
        found[it] = short.actions_of(like, kinds, ends_stage=ends_stage[it.stage] == index)
    before = [_scaled(it, few.num_microbatches, number) for it in _with_ahead(short.before(at_first), few, number)]
    between = _between_stages(few.between_stages, few_program, program)
    return RankProfile(tuple(before), found, few.behind, number, between)


class _ShortStep:
    """What the passes of a short step do, for passes of another one.

    Args:
        few: the short step.
        program: what its process does.
        gathering: of the plan.
    """

    def __init__(self, few: RankProfile, program: Sequence[Instruction], gathering: Gathering) -> None:
        self._passes, self._before = few.passes, few.before
        at_first, *received = kinds_received(program)
        self._messages = Received([few.before, *few.passes.values()], [at_first, *received])
        self._at_first, self._received = at_first, dict(zip(few.passes, received, strict=True))
        self._likes = _Likes(few.num_microbatches, list(few.passes), gathering)
        # What follows the last pass of each stage.
        self._reductions = {
            at.stage: reduction for at in few.passes if (reduction := self._without_messages(at, reduces=True))
        }
        self._made: dict[tuple[Pass, tuple[Kind, ...], bool], tuple[ActionProfile, ...]] = {}

    def like(self, wanted: Pass, number: int, effect: Effect) -> Pass:
        """Return a like pass, as `_Likes.like` does."""
        return self._likes.like(wanted, number, effect)

    def before(self, kinds: tuple[Kind, ...]) -> tuple[ActionProfile, ...]:
        """Return what comes before the passes, where some messages are received."""
        if kinds == self._at_first:
            return self._before
        return self._messages.added(self._messages.removed(self._before, self._at_first), kinds)

    def actions_of(self, like: Pass, kinds: tuple[Kind, ...], *, ends_stage: bool) -> tuple[ActionProfile, ...]:
        """Return what a pass does. Passes that do the same share it.

        Args:
            like: a like pass of the short step.
            kinds: of the messages that are received after it.
            ends_stage: whether it is the last one of its stage, which a reduction may follow.
        """
        key = like, kinds, ends_stage
        if key not in self._made:
            reduction = self._reductions.get(like.stage, ()) if ends_stage else ()
            actions = (*self._without_messages(like, reduces=False), *reduction)
            is_same = kinds == self._received[like] and len(actions) == len(self._passes[like])
            self._made[key] = self._passes[like] if is_same else self._messages.added(actions, kinds)
        return self._made[key]

    def _without_messages(self, at: Pass, *, reduces: bool) -> tuple[ActionProfile, ...]:
        """Return a pass, or the reduction that follows it, as if no message were received then."""
        actions = self._messages.removed(self._passes[at], self._received[at])
        return tuple(action for action in actions if (action.phase in REDUCTION) == reduces)


def _of_stages(kinds: Iterable[Kind], stages: Mapping[int, int]) -> tuple[Kind, ...]:
    return tuple(it._replace(stage=stages[it.stage]) for it in kinds)


@dataclass(frozen=True)
class Ways:
    """In which ways the passes of a process treat gradients, parameters and messages.

    Attributes:
        effects: phase, stage and effect of its passes.
        received: kinds of the messages that it receives.
        told_apart: those of them whose memory can be told apart.
    """

    effects: frozenset[tuple[str, int, Effect]]
    received: frozenset[Kind]
    told_apart: frozenset[Kind]

    def of_stages(self, stages: Mapping[int, int]) -> "Ways":
        """Return the same for other stages."""
        found = frozenset((phase, stages[stage], effect) for phase, stage, effect in self.effects)
        kinds = (frozenset(_of_stages(kinds, stages)) for kinds in (self.received, self.told_apart))
        return Ways(found, *kinds)

    def are_shown_by(self, few: "Ways") -> bool:
        """Return whether a like process shows all of them in another step."""
        return self.effects <= few.effects and self.received <= few.told_apart


def ways_of(program: Sequence[Instruction], gathering: Gathering) -> Ways:
    """Return in which ways the passes of a process treat gradients, parameters and messages.

    Args:
        program: what the process does.
        gathering: of the plan.
    """
    passes, received = passes_of(program), kinds_received(program)
    pairs = zip(passes, effects(passes, gathering), strict=True)
    found = frozenset((it.phase, it.stage, effect) for it, effect in pairs)
    return Ways(found, frozenset(chain(*received)), frozenset(kinds_told_apart(received)))


def passes_of(program: Sequence[Instruction]) -> list[Pass]:
    """Return the passes of a process, in order."""
    return [it.computed for it in program if it.computed is not None]


class _Likes:
    """Finds the pass of a short step that does what a pass of another one does."""

    def __init__(self, num_microbatches: int, passes: Sequence[Pass], gathering: Gathering) -> None:
        self._number, self._middle = num_microbatches, num_microbatches // 2
        self._effects = dict(zip(passes, effects(passes, gathering), strict=True))
        self._others = sorted(range(num_microbatches), key=lambda other: abs(other - self._middle))
        self._found: dict[tuple[Pass, Effect], Pass] = {}

    def like(self, wanted: Pass, number: int, effect: Effect) -> Pass:
        """Return a pass of the short step.

        Args:
            wanted: the pass, with the stage of the short step.
            number: of microbatches.
            effect: of the pass.
        """
        nearest = Pass(wanted.phase, wanted.stage, self._like(wanted.microbatch, number))
        key = nearest, effect
        if key not in self._found:
            near = (nearest, *(nearest._replace(microbatch=it) for it in self._others))
            self._found[key] = next(it for it in near if self._effects.get(it) == effect)
        return self._found[key]

    def _like(self, microbatch: int, number: int) -> int:
        from_end = number - microbatch
        if from_end < self._number - self._middle:
            return self._number - from_end
        return min(microbatch, self._middle)


def _between_stages(
    few: Mapping[Work, int], few_program: Sequence[Instruction], program: Sequence[Instruction]
) -> Counter[Work]:
    """Return the messages between stages, of which there are in proportion as many."""
    shown, wanted = (
        Counter({do: sum(len(it.messages) for it in of_step if it.do == do) for do in ("send", "receive")})
        for of_step in (few_program, program)
    )
    found = Counter[Work]()
    for work, times in few.items():
        do = "send" if work.name == SEND else "receive"
        found[work], rest = divmod(times * wanted[do], shown[do])
        if rest:
            raise RuntimeError(f"{times} x {work} do not belong to {shown[do]} instructions to {do} in equal parts")
    return found


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
            # What is not kept for the loss of a microbatch is freed at the end. Each message is
            # freed by the next one.
            grown = more * np.sum([before[middle].by_role() for middle in middles], axis=0)
            kept = more * np.sum([before[it].by_role() for it in ahead], axis=0) // few.num_microbatches
            for role, size in zip(ROLES, grown - kept, strict=True):
                if size and role is not Role.MESSAGES:
                    found[-1] = found[-1].with_change(-int(size), role)
    return found


def _scaled(action: ActionProfile, few: int, number: int) -> ActionProfile:
    """Return an action before the microbatches, with the batch of all of them."""
    scaled = action.changes * number // few
    return replace(action, changes=np.where(action.roles == ROLES.index(Role.BATCH), scaled, action.changes))
