"""Changes of a plan that need less memory."""

from collections.abc import Iterator

from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import RunConfig
from meshtrain.config.schedules import SCHEDULES


def smaller(config: RunConfig, plan: ParallelPlan, *, may_offload: bool) -> Iterator[tuple[str, RunConfig]]:
    """Yield changed runs that need less memory, with the change in words; small changes first.

    Args:
        config: of the run.
        plan: its plan, resolved.
        may_offload: whether there is other memory than that of the processes.
    """
    if plan.recompute.mode == "none":
        yield _changed(config, "recompute", mode="selective")
    if plan.recompute.mode != "full":
        yield _changed(config, "recompute", mode="full")
    splits_backward = plan.mesh.pp > 1 and SCHEDULES[plan.pipeline.schedule].splits_backward
    if plan.mesh.is_sharded and not splits_backward:
        yield from _more_sharded(config, plan)
    if plan.mesh.tp > 1 and not plan.tensor.sequence_parallel:
        yield _changed(config, "tensor", sequence_parallel=True)
    if config.micro_batch_size % 2 == 0:
        half = config.micro_batch_size // 2
        yield f"micro_batch_size={half}", config.model_copy(update={"micro_batch_size": half})
    if may_offload and plan.shard.offload == "none":
        yield _changed(config, "shard", offload="cpu")
        full = _changed(config, "recompute", mode="full")[1]
        words, both = _changed(full, "shard", offload="cpu")
        if plan.recompute.mode != "full":
            yield f"plan.recompute.mode=full {words}", both


def _more_sharded(config: RunConfig, plan: ParallelPlan) -> Iterator[tuple[str, RunConfig]]:
    shard = plan.shard
    each: dict[str, object] = {"reduce_gradients": "each_microbatch"}
    adds_up = config.global_batch_size > config.micro_batch_size * plan.mesh.data_degree
    if shard.level == 1 and adds_up:
        yield _changed(config, "shard", level=2)
    if shard.level == 3 and shard.reduce_gradients == "each_step" and adds_up:
        yield _changed(config, "shard", **each)
    if shard.reshard_after_forward == "never":
        freed: dict[str, object] = {} if shard.level == 3 else {"level": 3}
        freed["reshard_after_forward"] = "always"
        if shard.level != 2:
            yield _changed(config, "shard", **freed)
        if adds_up or shard.level == 2:
            yield _changed(config, "shard", **freed, **each)


def _changed(config: RunConfig, table: str, **values: object) -> tuple[str, RunConfig]:
    settings = getattr(config.plan, table).model_copy(update=values)
    plan = config.plan.model_copy(update={table: settings})
    words = " ".join(f"plan.{table}.{key}={str(value).lower()}" for key, value in values.items())
    return words, config.model_copy(update={"plan": plan})
