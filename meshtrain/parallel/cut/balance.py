"""Compute the number of decoder layers of each stage."""

import functools
import math
from collections.abc import Sequence
from itertools import pairwise


def even_layers(num_layers: int, num_stages: int) -> list[int]:
    """Return numbers of layers that are as equal as possible, the larger ones first."""
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def balanced_layers(layer_costs: Sequence[float], head_cost: float, num_stages: int) -> list[int]:
    """Return the numbers of layers that make the slowest stage as fast as possible.

    The first stage holds the modules before the layers and the first layer. The last stage holds
    the modules after the layers (the head), and may hold nothing else. Among equally fast cuts, the
    one with the least sum of squared stage costs wins.

    Args:
        layer_costs: cost of each decoder layer, in any unit; that of the first includes the modules
            before it.
        head_cost: cost of the modules after the layers, in the same unit.
        num_stages: at most the number of layers, plus one for a stage with only the head.

    Source: exact dynamic programming over contiguous partitions, in two passes. The first finds the
    cost of the slowest stage, the second the least squares among the cuts that are no slower.
    """
    num_layers = len(layer_costs)
    until = [0.0]
    for cost in layer_costs:
        until.append(until[-1] + cost)

    def ends(stage: int, start: int) -> range:
        # Every stage but the last needs at least one layer, so one is left for each stage between
        # this one and the last.
        return range(start + 1, num_layers - (num_stages - stage - 2) + 1)

    def price(start: int, end: int) -> float:
        return until[end] - until[start]

    @functools.cache
    def slowest(stage: int, start: int) -> float:
        if stage == num_stages - 1:
            return price(start, num_layers) + head_cost
        return min(max(price(start, end), slowest(stage + 1, end)) for end in ends(stage, start))

    @functools.cache
    def squares(stage: int, start: int) -> tuple[float, tuple[int, ...]]:
        if stage == num_stages - 1:
            last = price(start, num_layers) + head_cost
            return (last**2 if last <= limit else math.inf), (num_layers - start,)
        options: list[tuple[float, tuple[int, ...]]] = [(math.inf, (0,))]
        for end in ends(stage, start):
            if price(start, end) <= limit:
                further, rest = squares(stage + 1, end)
                options.append((price(start, end) ** 2 + further, (end - start, *rest)))
        return min(options)

    limit = slowest(0, 0)
    return list(squares(0, 0)[1])


def layers_split_at(names: Sequence[str], layers_name: str, num_layers: int) -> list[int]:
    """Return the numbers of layers that cut points such as "model.layers.8" describe.

    Args:
        names: first layer of each stage except the first, ascending; the caller has checked that
            they are layers of the model.
        layers_name: FQN of the list of decoder layers.
        num_layers: number of decoder layers of the model.
    """
    cuts = [0, *(int(name.removeprefix(f"{layers_name}.")) for name in names), num_layers]
    return [end - start for start, end in pairwise(cuts)]
