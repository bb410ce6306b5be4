"""What torch's pipeline schedules ask for: the only place that knows them apart."""

from dataclasses import dataclass
from typing import Literal

from meshtrain.config.plan import PipelinePlan, ScheduleName

Need = Literal["nothing", "one per stage", "equal rounds"]


@dataclass(frozen=True)
class Schedule:
    """Facts of one schedule.

    Attributes:
        stages_per_rank: how many stages a process must hold; None: any number.
        is_v: the stages go down the processes and up again, so the first process also holds the last stage. Otherwise
            they go round and round.
        splits_backward: the gradients of the input and those of the weights are computed apart (zero bubble).
        microbatches: what a step must have: `one per stage` or more, or `equal rounds` of pp or more each.
    """

    stages_per_rank: int | None = None
    is_v: bool = False
    splits_backward: bool = False
    microbatches: Need = "nothing"


SCHEDULES: dict[ScheduleName, Schedule] = {
    "GPipe": Schedule(stages_per_rank=1),
    "1F1B": Schedule(stages_per_rank=1, microbatches="one per stage"),
    "Interleaved1F1B": Schedule(microbatches="equal rounds"),
    "LoopedBFS": Schedule(),
    "InterleavedZeroBubble": Schedule(splits_backward=True, microbatches="equal rounds"),
    "ZBVZeroBubble": Schedule(stages_per_rank=2, is_v=True, splits_backward=True),
    "DualPipeV": Schedule(stages_per_rank=2, is_v=True, splits_backward=True, microbatches="one per stage"),
}


def stage_owners(plan: PipelinePlan, pp: int) -> list[int]:
    """Return the pp rank that holds each stage, of a pp axis of the given size."""
    num_stages = pp * plan.stages_per_rank
    if SCHEDULES[plan.schedule].is_v and pp > 1:
        return [min(stage, num_stages - 1 - stage) for stage in range(num_stages)]
    return [stage % pp for stage in range(num_stages)]
