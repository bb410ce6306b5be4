"""Choose a few layers of a stage that show what all of its layers do.

What a layer does in a step depends on its own kind, and on those of a few neighbors: FSDP2 gathers
the next layer and reduces the gradients of the last one while a layer computes, and the model holds
the input of the layer before. What all layers of a kind share begins with the first of them, and
ends with the last.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

BEFORE, BEHIND = 2, 1


class _Neighborhood(NamedTuple):
    """What decides what a layer does.

    Attributes:
        kinds: of the layers before it, its own, and those of the layers behind it.
        begins: whether it is the first of its kind.
        ends: whether it is the last of its kind.
    """

    kinds: tuple[Hashable, ...]
    begins: bool
    ends: bool


def fewest_layers(kinds: Sequence[Hashable]) -> list[int]:
    """Return the indices of a few layers: each layer has the same neighborhood as one of them.

    Args:
        kinds: of the layers, in order.
    """
    kept = list(range(len(kinds)))
    while (found := _longest_run(kinds, kept)) is not None:
        first, end = found
        del kept[first:end]
    return kept


def likes(kinds: Sequence[Hashable], kept: Sequence[int]) -> list[int]:
    """Return for each layer the position in `kept` of one with the same neighborhood."""
    among = reversed(list(enumerate(_neighborhoods(kinds, kept))))
    positions = {neighborhood: position for position, neighborhood in among}
    return [positions[neighborhood] for neighborhood in _neighborhoods(kinds, range(len(kinds)))]


def _longest_run(kinds: Sequence[Hashable], kept: Sequence[int]) -> tuple[int, int] | None:
    """Return the first position and the end of the longest run that can be left out.

    All others then have the same neighborhoods as before, and those of the run are among them.
    """
    found = _neighborhoods(kinds, kept)
    numbers = Counter(found)
    # The neighbors of a layer on both sides of the border in front of the next layer.
    borders: dict[Hashable, list[int]] = {}
    for position, window in enumerate(_windows([kinds[index] for index in kept], BEFORE - 1, BEHIND), start=1):
        borders.setdefault(window, []).append(position)
    runs = [(one, other) for alike in borders.values() for one in alike for other in alike if one < other]
    for first, end in sorted(runs, key=lambda run: run[0] - run[1]):
        left_out = Counter(found[first:end])
        if all(numbers[neighborhood] > number for neighborhood, number in left_out.items()):
            return first, end
    return None


def _neighborhoods(kinds: Sequence[Hashable], kept: Sequence[int]) -> list[_Neighborhood]:
    begins = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    ends = {kind: index for index, kind in enumerate(kinds)}
    windows = _windows([kinds[index] for index in kept], BEFORE, BEHIND)
    return [
        _Neighborhood(window, begins[kinds[index]] == index, ends[kinds[index]] == index)
        for index, window in zip(kept, windows, strict=True)
    ]


def _windows(kinds: Sequence[Hashable], before: int, behind: int) -> list[tuple[Hashable, ...]]:
    """Return each value with some before and behind it; None where there is none."""
    around = [*[None] * before, *kinds, *[None] * behind]
    return [tuple(around[begin : begin + before + 1 + behind]) for begin in range(len(kinds))]
