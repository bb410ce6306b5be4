"""Check what is sharded and when gradients are reduced, and fill in what is open."""

from typing import Literal

from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan, ShardPlan
from meshtrain.config.schedules import SCHEDULES
from meshtrain.errors import Problem
from meshtrain.parallel.check.batch import BatchShape, num_microbatches
from meshtrain.parallel.shard import needs_fsdp
from meshtrain.parallel.tensor.rules import Problems

Reduction = Literal["auto", "each_step", "each_microbatch"]
WHOLE_PARAMETERS = (1, 2)
# Level -> when gradients are reduced. Level 3 says nothing about it.
REDUCTIONS: dict[int, Reduction] = {1: "each_step", 2: "each_microbatch"}


def check_shard(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    """Yield what contradicts the level of sharding, or cannot be reduced in every microbatch."""
    shard = plan.shard
    if shard.level in WHOLE_PARAMETERS and shard.reshard_after_forward == "always":
        yield Problem(
            f"shard.level = {shard.level} keeps full parameters during a step, but shard.reshard_after_forward = "
            "'always' frees them after each pass",
            "leave one of them out",
        )
    if shard.level in WHOLE_PARAMETERS and not plan.mesh.is_sharded and plan.mesh.dp_replicate > 1:
        yield Problem(
            f"shard.level = {shard.level} shards over dp_shard, ep and cp, but each of the {plan.mesh.dp_replicate} "
            "copies of dp_replicate holds all parameters, so nothing would be sharded",
            f"set mesh.dp_shard = {plan.mesh.dp_replicate} in place of dp_replicate, or leave the level out",
        )
    wanted = REDUCTIONS.get(shard.level, "auto")
    if "auto" not in (wanted, shard.reduce_gradients) and shard.reduce_gradients != wanted:
        yield Problem(
            f"shard.level = {shard.level} reduces gradients {wanted!r}, but shard.reduce_gradients = "
            f"{shard.reduce_gradients!r}",
            f"leave it out, or set shard.level = {3 - shard.level}",
        )
    if needs_fsdp(plan) and resolve_shard(plan).reduce_gradients == "each_microbatch":
        yield from _check_each_microbatch(plan, batch)


def _check_each_microbatch(plan: ParallelPlan, batch: BatchShape) -> Problems:
    setting, schedule, precision = _setting(plan.shard), plan.pipeline.schedule, plan.precision
    if plan.mesh.pp > 1 and SCHEDULES[schedule].splits_backward:
        yield Problem(
            f"{setting} reduces the gradients of each microbatch, but pipeline.schedule = {schedule!r} computes those "
            "of the weights in passes without the hooks of FSDP2",
            "use 1F1B or Interleaved1F1B, or reduce them once per step (shard.level 1 or 3)",
        )
    # Over dp_replicate, FSDP2 adds up the parts in the format of the reduction.
    adds_up = num_microbatches(plan, batch) > 1 and plan.mesh.dp_replicate == 1
    if precision.reduce != precision.parameters == "bfloat16" and adds_up:
        yield Problem(
            f"{setting} reduces the gradients of each microbatch and adds them up in the number format of the "
            f"parameters, bfloat16, but precision.reduce = {precision.reduce!r}",
            "set precision.parameters = 'float32', or reduce them once per step (shard.level 1 or 3)",
        )


def _setting(shard: ShardPlan) -> str:
    return "shard.level = 2" if shard.level == 2 else "shard.reduce_gradients = 'each_microbatch'"


def resolve_shard(plan: ParallelPlan) -> ShardPlan:
    """Return the settings without `auto`; the mesh of the plan is resolved."""
    mesh, shard = plan.mesh, plan.shard
    reshard, reduce = shard.reshard_after_forward, shard.reduce_gradients
    if reshard == "auto":
        # With a pipeline, each microbatch would gather the parameters again. Without sharding,
        # freeing them saves nothing.
        is_never = shard.level in WHOLE_PARAMETERS or mesh.pp > 1 or not mesh.is_sharded
        reshard = "never" if is_never else "always"
    if reduce == "auto":
        reduce = REDUCTIONS.get(shard.level, "each_step")
    return shard.model_copy(update={"reshard_after_forward": reshard, "reduce_gradients": reduce})
