"""Check the pipeline of a plan (schedule, cuts), and count the layers of every stage."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan, PipelinePlan
from meshtrain.config.schedules import SCHEDULES, in_equal_rounds
from meshtrain.errors import Problem, UserError
from meshtrain.models.flops import flops_of_layers
from meshtrain.parallel.account import flops_around_layers
from meshtrain.parallel.check.batch import BatchShape, num_microbatches
from meshtrain.parallel.cut.balance import balanced_layers, even_layers, layers_split_at
from meshtrain.parallel.cut.cutter import check_cut, find_borders
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.shard import needs_fsdp
from meshtrain.parallel.tensor.rules import Problems


def check_pipeline(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    yield from _check_schedule(plan, batch)
    yield from _check_stage_numbers(plan, model)


def check_stages(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    """Run the stages of a pipeline on meta, unless `check_pipeline` reports their layers."""
    if plan.mesh.pp == 1 or any(True for _ in _check_stage_numbers(plan, model)):
        return
    try:
        sizes = resolve_layers(plan, model, batch)
        check_cut(model, sizes)
        if plan.tensor.sequence_parallel and plan.mesh.tp > 1:
            yield from _check_split_borders(model, sizes)
    except UserError as error:
        yield from error.problems


def _check_stage_numbers(plan: ParallelPlan, model: PreTrainedModel) -> Problems:
    pp, pipeline = plan.mesh.pp, plan.pipeline
    if pp > 1 and model.get_output_embeddings() is None:
        yield Problem(
            f"mesh.pp = {pp}, but {type(model).__name__} has no language modeling head, and only causal language "
            "models can be cut into stages",
            "use pp = 1",
        )
        return
    try:
        name, layers = find_layers(model)
    except UserError as error:
        yield from error.problems
    else:
        yield from _check_counts(pipeline, name, len(layers), pp * pipeline.stages_per_rank)


def _check_split_borders(model: PreTrainedModel, layers_per_stage: Sequence[int]) -> Problems:
    """Yield what stages send besides hidden states, if nothing tells whether it is split."""
    structure, routes = find_borders(model, layers_per_stage)
    trace = structure.trace
    places = dict.fromkeys(value.captured_at for route in routes for value in route.received)
    unknown = [place.described(trace) for place in places if place.follows_sequence(trace) is None]
    if unknown:
        yield Problem(
            f"tensor.sequence_parallel: stages of a {type(model).__name__} also send other tensors ({unknown[0]}), and "
            "nothing tells whether these are split",
            "set it to false",
        )


def _check_counts(pipeline: PipelinePlan, name: str, num_layers: int, stages: int) -> Problems:
    # The last stage may hold only the head, but `split_at` cannot name a cut after the last layer.
    if num_layers + (pipeline.split_at is None) < stages:
        yield Problem(
            f"mesh.pp x stages_per_rank makes {stages} stages, but the model has only {num_layers} layers",
            "use fewer",
        )
    elif pipeline.split_at is not None and pipeline.layers_per_stage != "balanced":
        yield Problem(
            f"pipeline: layers_per_stage = {pipeline.layers_per_stage!r} and split_at are both set", "leave one out"
        )
    elif pipeline.split_at is not None:
        yield from _check_split_at(pipeline.split_at, name, num_layers, stages)
    elif isinstance(pipeline.layers_per_stage, list):
        yield from _check_layers(pipeline.layers_per_stage, num_layers, stages)


def _check_schedule(plan: ParallelPlan, batch: BatchShape) -> Problems:
    pp, per_rank, name = plan.mesh.pp, plan.pipeline.stages_per_rank, plan.pipeline.schedule
    schedule = SCHEDULES[name]
    if pp == 1:
        if per_rank > 1:
            yield Problem(
                f"pipeline.stages_per_rank = {per_rank} needs mesh.pp > 1, found mesh.pp = 1", "change one of them"
            )
        return
    if schedule.stages_per_rank not in (None, per_rank):
        others = ", ".join(other for other, facts in SCHEDULES.items() if facts.stages_per_rank in (None, per_rank))
        yield Problem(
            f"pipeline.schedule = {name!r} needs stages_per_rank = {schedule.stages_per_rank}, found {per_rank}",
            f"set it to that, or use a schedule for {per_rank}: {others}",
        )
    else:
        yield from _check_all_batches(plan, batch)
    if schedule.splits_backward:
        yield from _check_split_backward(plan)


def _check_all_batches(plan: ParallelPlan, batch: BatchShape) -> Problems:
    problems = list(check_microbatches(plan, batch))
    yield from problems
    for size in () if problems else batch.smaller:
        for problem in check_microbatches(plan, replace(batch, global_batch_size=batch.rows * size)):
            yield Problem(
                f"batch_ramp has a batch of {size} {batch.counted_in}: {problem.found}",
                "set first and increment of batch_ramp to larger numbers",
            )
            return


def check_microbatches(plan: ParallelPlan, batch: BatchShape) -> Problems:
    """Yield each reason why the schedule cannot run a batch; the mesh of the plan is resolved."""
    pp, name = plan.mesh.pp, plan.pipeline.schedule
    stages, microbatches = pp * plan.pipeline.stages_per_rank, num_microbatches(plan, batch)
    unit = plan.mesh.data_degree * batch.micro_batch_size
    if batch.global_batch_size % unit:
        # The check of the batch reports this.
        return
    needs = SCHEDULES[name].microbatches
    if needs == "one per stage" and microbatches < stages:
        yield Problem(
            f"pipeline.schedule = {name!r} needs at least as many microbatches as stages: found {microbatches} for "
            f"{stages} stages",
            f"raise global_batch_size to {stages * unit // batch.rows} or lower micro_batch_size",
        )
    if needs == "equal rounds" and microbatches != in_equal_rounds(microbatches, pp):
        yield Problem(
            f"pipeline.schedule = {name!r} runs microbatches in equal rounds of at least pp = {pp}; {microbatches} "
            "cannot be divided in this way",
            f"use a multiple of {pp}",
        )


def _check_split_backward(plan: ParallelPlan) -> Problems:
    name = plan.pipeline.schedule
    if plan.shard.reshard_after_forward == "always" and needs_fsdp(plan):
        yield Problem(
            f"pipeline.schedule = {name!r} computes the gradients of the weights separately, and torch loses them "
            "without an error where parameters are freed in between (shard.reshard_after_forward = 'always')",
            "set it to 'never'",
        )
    if plan.compile.enabled:
        yield Problem(
            f"pipeline.schedule = {name!r} computes the gradients of the weights separately, which torch cannot do "
            "with compiled layers",
            "set compile.enabled = false, or use 1F1B or Interleaved1F1B",
        )


def _check_layers(layers: Sequence[int], num_layers: int, stages: int) -> Problems:
    what = f"pipeline.layers_per_stage = {list(layers)}"
    if len(layers) != stages:
        yield Problem(
            f"{what} names {len(layers)} stages, but mesh.pp x stages_per_rank makes {stages}", f"set {stages} numbers"
        )
    elif sum(layers) != num_layers:
        yield Problem(f"{what} adds up to {sum(layers)} layers, but the model has {num_layers}", "make them add up")
    elif 0 in layers[:-1]:
        yield Problem(
            f"{what}: only the last stage may have no layer (it still has the head)", "give every other stage a layer"
        )


def _check_split_at(names: Sequence[str], layers: str, num_layers: int, stages: int) -> Problems:
    allowed = [f"{layers}.{index}" for index in range(1, num_layers)]
    unknown = [name for name in names if name not in allowed]
    if len(names) != stages - 1:
        yield Problem(
            f"pipeline.split_at names {len(names)} cuts, but {stages} stages need {stages - 1}",
            f"name {stages - 1}" if stages > 1 else "leave it out",
        )
    elif unknown:
        yield Problem(
            f"pipeline.split_at: {unknown[0]!r} is not a layer where this model can be cut",
            f"name layers from {allowed[0]} to {allowed[-1]}",
        )
    elif [allowed.index(name) for name in names] != sorted({allowed.index(name) for name in names}):
        yield Problem(
            f"pipeline.split_at: the cuts {list(names)} are not in the order of the model",
            "name each once, from the first to the last",
        )


def resolve_layers(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> list[int]:
    name, layers = find_layers(model)
    stages = plan.mesh.pp * plan.pipeline.stages_per_rank
    wanted = plan.pipeline.layers_per_stage
    if plan.mesh.pp == 1:
        return [len(layers)]
    if plan.pipeline.split_at is not None:
        return layers_split_at(plan.pipeline.split_at, name, len(layers))
    if isinstance(wanted, list):
        return wanted
    if wanted == "even":
        return even_layers(len(layers), stages)
    before, after = flops_around_layers(model)
    first, *others = flops_of_layers(layers, model.config, batch.sequence_length)
    return balanced_layers([before + first, *others], after, stages)
