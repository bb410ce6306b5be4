"""The number of layers of each stage, against every possible cut."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from meshtrain.parallel.cut.balance import balanced_layers, even_layers, layers_split_at


def all_cuts(num_layers: int, num_stages: int) -> Iterator[list[int]]:
    """Yield every contiguous partition in which only the last stage may be empty."""
    for cuts in itertools.combinations(range(1, num_layers + 1), num_stages - 1):
        edges = [0, *cuts, num_layers]
        yield [end - start for start, end in itertools.pairwise(edges)]


def price(cut: Sequence[int], layer_costs: Sequence[float], head_cost: float) -> tuple[float, float]:
    """Return the cost of the slowest stage, and the sum of squares."""
    starts = itertools.accumulate(cut, initial=0)
    costs = [sum(layer_costs[start : start + number]) for start, number in zip(starts, cut, strict=False)]
    costs[-1] += head_cost
    return max(costs), sum(cost**2 for cost in costs)


@pytest.mark.parametrize("seed", range(20))
def test_balanced_cut_is_the_best_of_all(seed: int) -> None:
    stream = random.Random(seed)
    for num_layers in range(1, 9):
        costs = [float(stream.randint(1, 9)) for _ in range(num_layers)]
        head = float(stream.choice([0, 1, 5, 30]))
        for num_stages in range(1, num_layers + 2):
            found = balanced_layers(costs, head, num_stages)
            assert len(found) == num_stages
            assert sum(found) == num_layers
            assert 0 not in found[:-1]
            best = min(price(cut, costs, head) for cut in all_cuts(num_layers, num_stages))
            assert price(found, costs, head) == best, (costs, head, found)


def test_expensive_head_gets_its_own_stage() -> None:
    assert balanced_layers([1.0] * 4, 100.0, 2) == [4, 0]
    assert balanced_layers([1.0] * 4, 2.0, 2) == [3, 1]
    assert balanced_layers([1.0] * 4, 0.0, 2) == [2, 2]


def test_deep_model_is_balanced_quickly() -> None:
    assert balanced_layers([1.0] * 126, 3.0, 16) == [8] * 15 + [6]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(4, 1, [4]), (4, 2, [2, 2]), (7, 3, [3, 2, 2]), (5, 4, [2, 1, 1, 1]), (3, 3, [1, 1, 1])],
)
def test_even_layers(num_layers: int, num_stages: int, expected: list[int]) -> None:
    assert even_layers(num_layers, num_stages) == expected


def test_layers_split_at_names() -> None:
    assert layers_split_at(["model.layers.3", "model.layers.10"], "model.layers", 12) == [3, 7, 2]
    assert layers_split_at([], "model.layers", 12) == [12]
