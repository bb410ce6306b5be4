"""Measure steps in turn, so that a slow minute of the machine meets all of them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Found = TypeVar("Found")


def alternate(steps: Sequence[Callable[[], Found]], repeat: int) -> list[list[Found]]:
    """Return what each step returns, in each round, after one call of each that does not count."""
    torch.set_num_threads(1)
    for step in steps:
        step()
    rounds = []
    for number in range(repeat):
        # The order alternates, because a step finds the memory that the one before has freed.
        order = list(range(len(steps)))[:: 1 if number % 2 else -1]
        found = {index: steps[index]() for index in order}
        rounds.append([found[index] for index in range(len(steps))])
    return rounds
