"""What decides what a pass of a microbatch does, besides its stage: the passes before it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from meshtrain.compat.schedules import BACKWARD, FORWARD, WEIGHTS, Pass
from meshtrain.config.plan import ParallelPlan


class Gathers(NamedTuple):
    """What decides which parameters FSDP2 gathers in a pass.

    In a backward pass it gathers the layer ahead, in the order of all forward passes of the stage.
    It takes each backward pass for that of the last forward pass which had none yet. Before the
    layers of that come those of an earlier forward pass, so at its end it gathers one in vain,
    unless that was the first.

    Attributes:
        finds_gathered: whether the pass before has left a layer gathered.
        goes_too_far: whether it gathers a layer in vain.
        reduces_last: whether it is the last backward pass, if each of them reduces gradients.
    """

    finds_gathered: bool = False
    goes_too_far: bool = False
    reduces_last: bool = False


class Effect(NamedTuple):
    """What decides what a pass does with the gradients and the parameters of its stage.

    FSDP2 adds new gradients to the sum of those before in the next backward pass, which only
    schedules with passes of weights do later.

    Attributes:
        has_weights: whether the pass computes gradients of weights.
        finds_new: whether there are gradients that are not in the sum.
        finds_sum: whether there is a sum, for a pass that adds to it.
        gathers: what decides which parameters it gathers, if passes gather any.
    """

    has_weights: bool = False
    finds_new: bool = False
    finds_sum: bool = False
    gathers: Gathers = Gathers()


# One object for most passes of long steps.
_NOTHING = Effect()


class Gathering(NamedTuple):
    """How the passes of a plan gather parameters.

    Attributes:
        in_passes: whether passes gather parameters that others have freed; otherwise the first one
            of each stage does.
        reduces_each: whether each backward pass reduces gradients of shards, and not the last one
            alone.
    """

    in_passes: bool
    reduces_each: bool


def gathering_of(plan: ParallelPlan) -> Gathering:
    """Return how the passes of a resolved plan gather parameters."""
    in_passes = plan.shard.reshard_after_forward == "always"
    return Gathering(in_passes and plan.mesh.is_sharded, plan.shard.reduces_each_microbatch and plan.mesh.is_sharded)


def effects(passes: Sequence[Pass], gathering: Gathering) -> Iterator[Effect]:
    """Yield what decides what each pass of a process does.

    Args:
        passes: in their order.
        gathering: of the plan.
    """
    may_gather = gathering.in_passes or gathering.reduces_each
    found = _gathers(passes, gathering) if may_gather else repeat(_NOTHING.gathers, len(passes))
    split = {it._replace(phase=BACKWARD) for it in passes if it.phase == WEIGHTS}
    with_new, with_sum = set[int](), set[int]()
    for it, own in zip(passes, found, strict=True):
        new, summed = it.stage in with_new, it.stage in with_sum
        if it.phase == WEIGHTS:
            yield Effect(has_weights=True, finds_new=new, gathers=own)
            with_new.add(it.stage)
        elif it.phase == BACKWARD and (new or it not in split):
            yield Effect(it not in split, new, summed, own)
            with_new.discard(it.stage)
            with_sum.add(it.stage)
        else:
            yield Effect(gathers=own) if may_gather else _NOTHING


def _gathers(passes: Sequence[Pass], gathering: Gathering) -> Iterator[Gathers]:
    last = {it.stage: index for index, it in enumerate(passes) if it.phase == BACKWARD}
    # Stage -> number of its forward passes, and those without a backward pass yet.
    numbers, pending = Counter[int](), defaultdict[int, list[int]](list)
    gathered: set[int] = set()
    for index, it in enumerate(passes):
        found = it.stage in gathered
        gathered.discard(it.stage)
        if it.phase == FORWARD:
            pending[it.stage].append(numbers[it.stage])
            numbers[it.stage] += 1
        goes_too_far = it.phase == BACKWARD and pending[it.stage].pop() > 0
        reduces_last = gathering.reduces_each and last[it.stage] == index
        if not (gathering.in_passes or reduces_last):
            # All parameters are gathered anyway.
            yield _NOTHING.gathers
            continue
        if goes_too_far:
            gathered.add(it.stage)
        yield Gathers(found, goes_too_far, reduces_last)
