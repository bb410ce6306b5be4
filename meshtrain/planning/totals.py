"""Messages and floating-point operations of one process in a step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from meshtrain.compat.operators_seen import shown_name
from meshtrain.planning.simulation.recorder import Work


@dataclass(frozen=True)
class Totals:
    """What one process computes and sends in a step.

    Attributes:
        flops: of matrix products and attention, with recomputation.
        messages: (axis, operator) -> number and bytes. The bytes of a message are those of its
            larger side.
    """

    flops: int
    messages: dict[tuple[str, str], tuple[int, int]]


def totals_of(work: Mapping[Work, int]) -> Totals:
    """Return the totals of a step.

    Args:
        work: how often each kind of operator runs.
    """
    numbers: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    flops = 0
    for kind, number in work.items():
        flops += kind.flops * number
        if kind.axis is not None:
            key = kind.axis, shown_name(kind.name)
            numbers[key] += number
            sizes[key] += number * kind.num_bytes
    return Totals(flops, {key: (numbers[key], sizes[key]) for key in sorted(numbers)})
