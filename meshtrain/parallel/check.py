"""Does this plan fit this model, these batches and so many processes? Every contradiction at once, up front."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from meshtrain.config.plan import AXES, MeshPlan, ParallelPlan
from meshtrain.errors import PlanError, UserError
from meshtrain.models.flops import head_flops_per_token, layer_flops_per_token
from meshtrain.models.fused import unfuse
from meshtrain.parallel.anatomy import examine, find_layers
from meshtrain.parallel.balance import balanced_layers, even_layers, layers_split_at
from meshtrain.parallel.tensor import resolve_rules


@dataclass(frozen=True)
class BatchShape:
    """What the run says about batches.

    Attributes:
        global_batch_size: in sequences.
        micro_batch_size: in sequences.
        sequence_length: in tokens.
    """

    global_batch_size: int
    micro_batch_size: int
    sequence_length: int


def resolve_plan(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape, world_size: int) -> ParallelPlan:
    """Return the plan with nothing left open: no -1, `auto`, `balanced` or `even`.

    Args:
        plan: with its family already joined.
        model: the stock model on meta; it is not changed.
        batch: the shape of the batches.
        world_size: the number of processes.

    Raises:
        PlanError: with every contradiction that can be found.
    """
    mesh = _resolve_mesh(plan.mesh, world_size)
    plan = plan.model_copy(update={"mesh": mesh})
    problems: list[str] = []
    for check in (_check_model_type, _check_batch, _check_sequence, _check_tensor, _check_pipeline, _check_recompute):
        problems += check(plan, model, batch)
    if problems:
        raise PlanError(problems)
    layers = _resolve_layers(plan, model, batch)
    reshard = plan.shard.reshard_after_forward
    if reshard == "auto":
        # With a pipeline each microbatch would gather anew; without sharding nothing is gained by freeing.
        reshard = "never" if mesh.pp > 1 or mesh.dp_shard == 1 else "always"
    return plan.model_copy(
        update={
            "pipeline": plan.pipeline.model_copy(update={"layers_per_stage": layers, "split_at": None}),
            "shard": plan.shard.model_copy(update={"reshard_after_forward": reshard}),
        }
    )


def num_microbatches(plan: ParallelPlan, batch: BatchShape) -> int:
    """Return how many microbatches each process runs per step, by a resolved mesh."""
    return batch.global_batch_size // (plan.mesh.dp_replicate * plan.mesh.dp_shard * batch.micro_batch_size)


def _resolve_mesh(mesh: MeshPlan, world_size: int) -> MeshPlan:
    fixed = mesh.pp * mesh.dp_replicate * mesh.tp
    degrees = " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES if axis != "dp_shard" or mesh.dp_shard != -1)
    if mesh.dp_shard != -1:
        if fixed * mesh.dp_shard != world_size:
            raise PlanError(
                f"mesh: {degrees} needs {fixed * mesh.dp_shard} processes, there are {world_size}; start as many, or "
                "set plan.mesh.dp_shard = -1 to use what is there"
            )
        return mesh
    if world_size % fixed:
        raise PlanError(
            f"mesh: {degrees} uses processes in groups of {fixed}, which does not divide the {world_size} there "
            f"are; start a multiple of {fixed}, or change the degrees"
        )
    return mesh.model_copy(update={"dp_shard": world_size // fixed})


Problems = Iterator[str]


def _check_model_type(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    model_type = model.config.model_type
    if plan.model_types and model_type not in plan.model_types:
        known = ", ".join(plan.model_types)
        yield f"model_types: this plan is for {known}, the model is a {model_type}; use another plan"


def _check_batch(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    data_ways = plan.mesh.dp_replicate * plan.mesh.dp_shard
    unit = data_ways * batch.micro_batch_size
    if batch.global_batch_size % unit:
        yield (
            f"global_batch_size = {batch.global_batch_size} is not a multiple of dp {data_ways} x micro_batch_size "
            f"{batch.micro_batch_size} = {unit}; the nearest are {_nearest_multiples(batch.global_batch_size, unit)}"
        )
        return
    microbatches = num_microbatches(plan, batch)
    schedule, stages = plan.pipeline.schedule, plan.mesh.pp * plan.pipeline.stages_per_rank
    if plan.mesh.pp > 1 and schedule == "1F1B" and microbatches < stages:
        yield (
            f"pipeline.schedule = '1F1B' needs at least as many microbatches as stages: there are {microbatches} "
            f"microbatches and {stages} stages; raise global_batch_size to {stages * unit} or lower micro_batch_size"
        )
    if plan.mesh.pp > 1 and schedule == "Interleaved1F1B" and microbatches % max(1, microbatches // plan.mesh.pp):
        yield (
            f"pipeline.schedule = 'Interleaved1F1B' runs microbatches in equal rounds of at least pp = {plan.mesh.pp}; "
            f"{microbatches} cannot be so divided; use a multiple of {plan.mesh.pp}"
        )


def _check_sequence(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and batch.sequence_length > positions:
        yield (
            f"data.sequence_length = {batch.sequence_length} is longer than the {positions} positions of the model; "
            "shorten it, or raise max_position_embeddings of a new model"
        )
    tp = plan.mesh.tp
    if plan.tensor.sequence_parallel and batch.sequence_length % tp:
        yield (
            f"tensor.sequence_parallel splits the sequence over tp = {tp}, which does not divide data.sequence_length "
            f"= {batch.sequence_length}; the nearest are {_nearest_multiples(batch.sequence_length, tp)}"
        )


def _check_tensor(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    if plan.mesh.tp == 1 and not plan.tensor.fused:
        return
    if plan.mesh.tp > 1 and not plan.tensor.styles:
        yield (
            f"tensor.styles: mesh.tp = {plan.mesh.tp}, but there are no rules for a {model.config.model_type}: no "
            "shipped family plan knows it; write the rules, or set mesh.tp = 1"
        )
        return
    heads = list(_check_heads(plan, model))
    yield from heads
    unfused = copy.deepcopy(model)
    try:
        unfuse(unfused, plan.tensor.fused)
        if plan.mesh.tp > 1:
            styles = resolve_rules(unfused, plan.tensor).styles
            yield from _check_widths(styles, unfused, plan.mesh.tp, skip_attention=bool(heads))
    except UserError as error:
        yield from error.problems


def _check_heads(plan: ParallelPlan, model: PreTrainedModel) -> Problems:
    config, tp = model.config.get_text_config(), plan.mesh.tp
    for what, name in (("attention heads", "num_attention_heads"), ("key-value heads", "num_key_value_heads")):
        count = getattr(config, name, None)
        if count is not None and count % tp:
            yield (f"mesh.tp = {tp} does not divide the model's {count} {what} ({name}); tp can be {_divisors(count)}")


def _check_widths(styles: Mapping[str, str], model: nn.Module, tp: int, *, skip_attention: bool) -> Problems:
    """Yield one problem per kind of projection whose sharded width tp does not divide."""
    seen = set()
    for name, style in styles.items():
        if style not in ("colwise", "rowwise") or (skip_attention and "attn" in name):
            continue
        module = model.get_submodule(name)
        assert isinstance(module.weight, Tensor)
        transposed = not isinstance(module, nn.Linear)
        width = module.weight.shape[0 if (style == "colwise") != transposed else 1]
        kind = name.rpartition(".")[2]
        if width % tp and kind not in seen:
            seen.add(kind)
            yield f"mesh.tp = {tp} does not divide the width {width} of {name} ({style}); tp can be {_divisors(width)}"


def _check_pipeline(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    pp, pipeline = plan.mesh.pp, plan.pipeline
    stages = pp * pipeline.stages_per_rank
    if pipeline.stages_per_rank > 1 and (pp == 1 or pipeline.schedule != "Interleaved1F1B"):
        yield (
            f"pipeline.stages_per_rank = {pipeline.stages_per_rank} needs mesh.pp > 1 and schedule 'Interleaved1F1B', "
            f"found mesh.pp = {pp} and {pipeline.schedule!r}; change one of them"
        )
    try:
        name, layers = find_layers(model)
        if pp > 1:
            examine(model)
    except UserError as error:
        yield from error.problems
        return
    if len(layers) < stages:
        yield (
            f"mesh.pp x stages_per_rank makes {stages} stages, but the model has only {len(layers)} layers; use fewer"
        )
    elif pipeline.split_at is not None:
        yield from _check_split_at(pipeline.split_at, name, len(layers), stages)
    elif isinstance(pipeline.layers_per_stage, list):
        yield from _check_layers(pipeline.layers_per_stage, len(layers), stages)


def _check_layers(layers: Sequence[int], num_layers: int, stages: int) -> Problems:
    what = f"pipeline.layers_per_stage = {list(layers)}"
    if len(layers) != stages:
        yield f"{what} names {len(layers)} stages, but mesh.pp x stages_per_rank makes {stages}; give {stages} numbers"
    elif sum(layers) != num_layers:
        yield f"{what} adds up to {sum(layers)} layers, but the model has {num_layers}; make them add up"
    elif 0 in layers[:-1]:
        yield f"{what}: only the last stage may have no layer (it still has the head)"


def _check_split_at(names: Sequence[str], layers: str, num_layers: int, stages: int) -> Problems:
    allowed = [f"{layers}.{index}" for index in range(1, num_layers)]
    unknown = [name for name in names if name not in allowed]
    if unknown:
        yield (
            f"pipeline.split_at: {unknown[0]!r} is no layer where this model can be cut; those are {allowed[0]} to "
            f"{allowed[-1]}"
        )
    elif len(names) != stages - 1:
        yield f"pipeline.split_at names {len(names)} cuts, but {stages} stages need {stages - 1}"
    elif [allowed.index(name) for name in names] != sorted({allowed.index(name) for name in names}):
        yield f"pipeline.split_at: the cuts {list(names)} are not in the order of the model"


def _check_recompute(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    layer = find_layers(model)[1][0]
    if plan.recompute.mode != "none" and not isinstance(layer, GradientCheckpointingLayer):
        yield (
            f"recompute.mode = {plan.recompute.mode!r}: {type(layer).__name__} does not know recomputation; "
            "set it to 'none'"
        )


def _resolve_layers(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> list[int]:
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
    costs = [layer_flops_per_token(layer, model.config, batch.sequence_length) for layer in layers]
    return balanced_layers(costs, head_flops_per_token(model.get_output_embeddings()), stages)


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _nearest_multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return " and ".join(str(multiple) for multiple in (below, below + unit) if multiple)
