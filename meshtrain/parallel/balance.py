"""How many decoder layers each stage gets."""

import functools
from collections.abc import Sequence
from itertools import pairwise


def even_layers(num_layers: int, num_stages: int) -> list[int]:
    """Return as equal numbers as can be, the larger ones first."""
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def balanced_layers(layer_costs: Sequence[float], head_cost: float, num_stages: int) -> list[int]:
    """Return the numbers that make the slowest stage as fast as can be.

    The embedding costs next to nothing and belongs to the first stage; the head belongs to the last, which may hold
    nothing else. Among equals, the cut with the least sum of squares wins.

    Args:
        layer_costs: of each decoder layer, in any unit.
        head_cost: of what follows the layers, in the same unit.
        num_stages: at most the number of layers, plus one for a stage with the head only.

    Source: exact dynamic programming over contiguous partitions.
    """
    num_layers = len(layer_costs)
    until = [0.0]
    for cost in layer_costs:
        until.append(until[-1] + cost)

    @functools.cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        if stage == num_stages - 1:
            cost = until[num_layers] - until[start] + head_cost
            return cost, cost**2, (num_layers - start,)
        options = []
        # Each stage but the last keeps at least one layer, and so must those between here and the last.
        for end in range(start + 1, num_layers - (num_stages - stage - 2) + 1):
            cost = until[end] - until[start]
            slowest, squares, rest = best(stage + 1, end)
            options.append((max(cost, slowest), cost**2 + squares, (end - start, *rest)))
        return min(options)

    return list(best(0, 0)[2])


def layers_split_at(names: Sequence[str], layers_name: str, num_layers: int) -> list[int]:
    """Return the numbers that cut points such as "model.layers.8" describe.

    Args:
        names: the first layer of each stage but the first, ascending; already checked to be layers of the model.
    """
    cuts = [0, *(int(name.removeprefix(f"{layers_name}.")) for name in names), num_layers]
    return [end - start for start, end in pairwise(cuts)]
