"""What happens outside the passes of microbatches in a step, for any number of layers.

There a process computes with the parameters of all layers alike, so that each layer adds the same.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from meshtrain.planning.simulation.profile import ROLES, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import Role, Work

# What exists before the step, and depends on the number of layers.
STATE = (Role.PARAMETERS, Role.BUFFERS, Role.OPTIMIZER)
_Sizes = tuple[int, ...]
_Counts = Mapping[tuple[Any, _Sizes], int]


class UnevenGrowthError(Exception):
    """Raised when it is not clear what one more layer adds."""


@dataclass(frozen=True)
class Outside:
    """What a process does in a step outside the passes of microbatches.

    Attributes:
        state: the memory of parameters, buffers and optimizer before the step.
        behind: what follows the passes.
    """

    state: ActionProfile
    behind: tuple[ActionProfile, ...]

    def with_more_layers(self, more: "Outside", times: int) -> "Outside":
        """Return the same with more layers.

        Args:
            more: the same with one more layer.
            times: how many more there are.

        Raises:
            UnevenGrowthError: if it is not clear what the layer adds.
        """
        if len(self.behind) != len(more.behind):
            raise UnevenGrowthError("there are other sections")
        behind = [_grown(one, other, times) for one, other in zip(self.behind, more.behind, strict=True)]
        return Outside(_grown(self.state, more.state, times), tuple(behind))

    def with_buffers(self, sizes: Iterable[int]) -> "Outside":
        """Return the same with more buffers, whose sizes are in bytes."""
        state = self.state
        for size in sizes:
            state = state.with_change(size, Role.BUFFERS)
        return replace(self, state=state)


def outside_of(profile: RankProfile) -> Outside:
    """Return what a process does outside the passes."""
    first = profile.before[0]
    is_state = np.isin(first.roles, [ROLES.index(role) for role in STATE])
    state = replace(first, changes=first.changes[is_state], roles=first.roles[is_state], work=())
    return Outside(state, profile.behind)


def _grown(few: ActionProfile, more: ActionProfile, times: int) -> ActionProfile:
    if len(few.work) != len(more.work) or few.phase != more.phase:
        raise UnevenGrowthError("there are other messages")
    changes = [*_grown_changes(few, more, times)]
    return replace(
        few,
        changes=np.array([size for size, _ in changes], dtype=np.int64),
        roles=np.array([role for _, role in changes], dtype=np.int64),
        work=tuple(_grown_work(one, other, times) for one, other in zip(few.work, more.work, strict=True)),
    )


def _grown_changes(few: ActionProfile, more: ActionProfile, times: int) -> Iterator[tuple[int, int]]:
    """Yield changes of memory and their roles. Between two of other signs the order is lost."""
    runs, longer = _runs(few), _runs(more)
    if len(runs) != len(longer):
        yield from _repeated(few, more, times)
        return
    for one, other in zip(runs, longer, strict=True):
        for (role, (size,)), number in _grown_counts(one, other, times).items():
            yield from [(size, role)] * number


def _repeated(few: ActionProfile, more: ActionProfile, times: int) -> list[tuple[int, int]]:
    """Return changes of memory and their roles, where a layer adds some in one place or in two.

    An optimizer that updates one parameter after the other does so: it has matrices and vectors in
    different groups.
    """
    one, other = (list(zip(it.changes.tolist(), it.roles.tolist(), strict=True)) for it in (few, more))
    added = len(other) - len(one)
    begin = _num_alike(one, other)
    for first in range(added, 0, -1):
        rest, behind = one[begin:], other[begin + first :]
        middle = _num_alike(rest, behind)
        second = behind[middle : middle + added - first]
        if rest[middle:] == behind[middle + len(second) :]:
            block = other[begin : begin + first]
            return [*one[:begin], *block * times, *rest[:middle], *second * times, *rest[middle:]]
    raise UnevenGrowthError("memory grows and shrinks in another order")


def _num_alike(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many of the first items of two sequences are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def _runs(action: ActionProfile) -> list[_Counts]:
    """Return how often each change occurs, for each run of changes of the same sign."""
    pairs = zip(action.changes.tolist(), action.roles.tolist(), strict=True)
    groups = groupby(pairs, key=lambda pair: pair[0] > 0)
    return [Counter((role, (size,)) for size, role in group) for _, group in groups]


def _grown_work(few: Counter[Work] | Work, more: Counter[Work] | Work, times: int) -> Counter[Work] | Work:
    if isinstance(few, Work) != isinstance(more, Work):
        raise UnevenGrowthError("there are other messages")
    found: Counter[Work] = Counter()
    for (kind, (flops, num_bytes)), number in _grown_counts(_work_counts(few), _work_counts(more), times).items():
        name, dtype, axis = kind
        found[Work(name, dtype, flops, num_bytes, axis)] = number
    return next(iter(found)) if isinstance(few, Work) else found


def _work_counts(work: Counter[Work] | Work) -> _Counts:
    counts = {work: 1} if isinstance(work, Work) else work
    return {((it.name, it.dtype, it.axis), (it.flops, it.num_bytes)): number for it, number in counts.items()}


def _grown_counts(few: _Counts, more: _Counts, times: int) -> dict[tuple[Any, _Sizes], int]:
    """Return numbers of things that have a kind and sizes.

    Either their number grows with the layers, or their sizes do.
    """
    shrunk, added = (_by_kind(Counter(one) - Counter(other)) for one, other in ((few, more), (more, few)))
    grown = Counter(few) & Counter(more)
    for kind in shrunk.keys() | added.keys():
        old, new = shrunk.get(kind, []), added.get(kind, [])
        more_of = [] if len(old) == len(new) else [sizes for sizes in new if (kind, sizes) in few]
        for sizes in more_of:
            new.remove(sizes)
            grown[kind, sizes] += times
        if len(old) != len(new):
            raise UnevenGrowthError("there are other sizes")
        for before, after in zip(old, new, strict=True):
            pairs = [*zip(before, after, strict=True)]
            if any(abs(other) < abs(one) for one, other in pairs):
                raise UnevenGrowthError("something becomes less with a layer")
            grown[kind, tuple(one + times * (other - one) for one, other in pairs)] += 1
    return dict(grown)


def _by_kind(counts: _Counts) -> dict[Any, list[_Sizes]]:
    """Return kind -> the sizes, in order."""
    found: dict[Any, list[_Sizes]] = defaultdict(list)
    for (kind, sizes), number in counts.items():
        found[kind] += [sizes] * number
    # What is freed is negative.
    return {kind: sorted(sizes, key=lambda it: [*map(abs, it)]) for kind, sizes in found.items()}
