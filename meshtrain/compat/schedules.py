"""The order in which torch's pipeline schedules compute."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _ComputationType,
    get_schedule_class,
)

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "backward of weights"
_PASSES = {
    _ComputationType.FORWARD: FORWARD,
    _ComputationType.FULL_BACKWARD: BACKWARD,
    _ComputationType.BACKWARD_INPUT: BACKWARD,
    _ComputationType.BACKWARD_WEIGHT: WEIGHTS,
}


class Pass(NamedTuple):
    """One pass of a microbatch through a stage.

    Attributes:
        phase: forward, backward, or backward of weights if that is separate.
        stage: its index.
        microbatch: counted from 0.

    Why: the action of torch's schedules is private.
    Holds: torch 2.11 to 2.13.
    """

    phase: str
    stage: int
    microbatch: int


class _Stage:
    """What a schedule asks of a stage before it runs."""

    def __init__(self, index: int, number: int, pp: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, number, 0, pp
        self.is_first, self.is_last, self.has_backward = index == 0, index == number - 1, True
        self.device, self.group, self.dw_builder = torch.device("cpu"), None, None
        self.submod = nn.Identity()


def pass_orders(schedule: str, owners: list[int], num_microbatches: int) -> list[list[Pass]]:
    """Return the passes of every process of a pipeline, in order.

    Why: only a private attribute of torch's schedules has the order. The one of 1F1B is wrong for
    the last process; its code, which runs it, is not.
    Holds: torch 2.11 to 2.13.

    Args:
        schedule: its name.
        owners: the process of each stage.
        num_microbatches: of a step.

    Raises:
        ValueError: if the schedule refuses this number.
    """
    pp = max(owners) + 1
    kind = get_schedule_class(schedule)
    if not issubclass(kind, PipelineScheduleMulti):
        return [_single(schedule, rank, pp, num_microbatches) for rank in range(pp)]
    stages: Any = [_Stage(stage, len(owners), pp) for stage, owner in enumerate(owners) if owner == 0]
    built = kind(stages, num_microbatches, loss_fn=lambda output, target: output)
    return [_passes(built.pipeline_order[rank]) for rank in range(pp)]


def _single(schedule: str, rank: int, pp: int, num_microbatches: int) -> list[Pass]:
    """Return the passes of a process with one stage: all forward first (GPipe), or 1F1B."""
    ahead = num_microbatches if schedule == "GPipe" else min(num_microbatches, pp - 1 - rank)
    passes = [Pass(FORWARD, rank, microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        if ahead + microbatch < num_microbatches:
            passes.append(Pass(FORWARD, rank, ahead + microbatch))
        passes.append(Pass(BACKWARD, rank, microbatch))
    return passes


def _passes(actions: list[_Action | None]) -> list[Pass]:
    found = []
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            if part.computation_type in _PASSES:
                assert part.microbatch_index is not None
                found.append(Pass(_PASSES[part.computation_type], part.stage_index, part.microbatch_index))
    return found
