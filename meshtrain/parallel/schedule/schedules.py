"""The process of each stage of a pipeline schedule."""

from meshtrain.config.plan import PipelinePlan
from meshtrain.config.schedules import SCHEDULES


def stage_owners(plan: PipelinePlan, pp: int) -> list[int]:
    """Return the pp rank of each stage on a pp axis of size `pp`."""
    num_stages = pp * plan.stages_per_rank
    if SCHEDULES[plan.schedule].is_v and pp > 1:
        return [min(stage, num_stages - 1 - stage) for stage in range(num_stages)]
    return [stage % pp for stage in range(num_stages)]
