"""Choose a few layers of a stage that show what all of its layers do.

What a layer does in a step depends on its own kind, and on those of a few neighbors: FSDP2 gathers
the next layers and reduces the gradients of the last one while a layer computes, and the model
holds the input of the layer before. What all layers of a kind share begins with the first of them,
and ends with the last.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Reach(NamedTuple):
    """How many neighbors of a layer matter to it.

    Attributes:
        before: among the layers before it.
        behind: among those behind it.
    """

    before: int = 2
    behind: int = 1

    def gathering(self, ahead: int) -> "Reach":
        """Return the reach if FSDP2 gathers some layers ahead, in both directions."""
        return Reach(max(self.before, ahead), max(self.behind, ahead))


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


NEAREST = Reach()


def fewest_layers(kinds: Sequence[Hashable], reach: Reach = NEAREST) -> list[int]:
    """Return the indices of a few layers: each layer has the same neighborhood as one of them.

    Args:
        kinds: of the layers, in order.
        reach: of the neighborhoods.
    """
    kept = list(range(len(kinds)))
    while (found := _longest_run(kinds, kept, reach)) is not None:
        first, end = found
        del kept[first:end]
    return kept


def likes(kinds: Sequence[Hashable], kept: Sequence[int], reach: Reach = NEAREST) -> list[int]:
    """Return for each layer the position in `kept` of one with the same neighborhood."""
    among = reversed(list(enumerate(_neighborhoods(kinds, kept, reach))))
    positions = {neighborhood: position for position, neighborhood in among}
    return [positions[neighborhood] for neighborhood in _neighborhoods(kinds, range(len(kinds)), reach)]


def _longest_run(kinds: Sequence[Hashable], kept: Sequence[int], reach: Reach) -> tuple[int, int] | None:
    """Return the first position and the end of the longest run that can be left out.

    All others then have the same neighborhoods as before, and those of the run are among them.
    """
    found = _neighborhoods(kinds, kept, reach)
    numbers = Counter(found)
    # The neighbors of a layer on both sides of the border in front of the next layer.
    borders: dict[Hashable, list[int]] = {}
    around = reach._replace(before=reach.before - 1)
    for position, window in enumerate(_windows([kinds[index] for index in kept], around), start=1):
        borders.setdefault(window, []).append(position)
    runs = [(one, other) for alike in borders.values() for one in alike for other in alike if one < other]
    for first, end in sorted(runs, key=lambda run: run[0] - run[1]):
        left_out = Counter(found[first:end])
        if all(numbers[neighborhood] > number for neighborhood, number in left_out.items()):
            return first, end
    return None


def _neighborhoods(kinds: Sequence[Hashable], kept: Sequence[int], reach: Reach) -> list[_Neighborhood]:
    begins = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    ends = {kind: index for index, kind in enumerate(kinds)}
    windows = _windows([kinds[index] for index in kept], reach)
    return [
        _Neighborhood(window, begins[kinds[index]] == index, ends[kinds[index]] == index)
        for index, window in zip(kept, windows, strict=True)
    ]


def _windows(kinds: Sequence[Hashable], reach: Reach) -> list[tuple[Hashable, ...]]:
    """Return each value with some before and behind it; None where there is none."""
    around = [*[None] * reach.before, *kinds, *[None] * reach.behind]
    return [tuple(around[begin : begin + sum(reach) + 1]) for begin in range(len(kinds))]
