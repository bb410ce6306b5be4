"""Pipeline schedules of torch: their names in a plan, and their requirements.

A new schedule of torch is a name and a row here. Only this module distinguishes between schedules.
"""

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
Need = Literal["any number", "one per stage", "equal rounds"]


@dataclass(frozen=True)
class Schedule:
    """Facts of one schedule.

    Attributes:
        stages_per_rank: the number of stages that a process must hold; None: any number.
        is_v: whether the stages run from the first process to the last and back, so that the first
            process also holds the last stage. Otherwise stage i is on process i modulo pp.
        splits_backward: whether the gradients of the input and those of the weights are computed
            separately (zero bubble).
        microbatches: what a step must have: `one per stage` or more, or `equal rounds` of at least
            pp microbatches each.
    """

    stages_per_rank: int | None = None
    is_v: bool = False
    splits_backward: bool = False
    microbatches: Need = "any number"


SCHEDULES: dict[ScheduleName, Schedule] = {
    "GPipe": Schedule(stages_per_rank=1),
    "1F1B": Schedule(stages_per_rank=1, microbatches="one per stage"),
    "Interleaved1F1B": Schedule(microbatches="equal rounds"),
    "LoopedBFS": Schedule(),
    "InterleavedZeroBubble": Schedule(splits_backward=True, microbatches="equal rounds"),
    "ZBVZeroBubble": Schedule(stages_per_rank=2, is_v=True, splits_backward=True),
    "DualPipeV": Schedule(stages_per_rank=2, is_v=True, splits_backward=True, microbatches="one per stage"),
}


def in_equal_rounds(number: int, pp: int) -> int:
    """Return how many of a number of microbatches make equal rounds of at least pp: the most."""
    return number - number % max(1, number // pp)
