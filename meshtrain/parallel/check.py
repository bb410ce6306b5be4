"""Does this plan fit this model, these batches and so many processes? Every contradiction at once, up front."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from meshtrain.config.plan import AXES, MeshPlan, ParallelPlan, Style
from meshtrain.errors import PlanError, UserError
from meshtrain.models.flops import head_flops_per_token, layer_flops_per_token
from meshtrain.models.fused import unfuse
from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.anatomy import find_layers
from meshtrain.parallel.balance import balanced_layers, even_layers, layers_split_at
from meshtrain.parallel.cut import check_cut
from meshtrain.parallel.randomness import attention_dropout
from meshtrain.parallel.rules import Problems, match_rules, resolve_rules, sharded_dims


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
    for check in (_check_model, _check_batch, _check_sequence, _check_tensor, _check_pipeline, _check_recompute):
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


def _check_model(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    model_type = model.config.model_type
    if plan.model_types and model_type not in plan.model_types:
        known = ", ".join(plan.model_types)
        yield f"model_types: this plan is for {known}, the model is a {model_type}; use another plan"
    for name in ("layerdrop", "decoder_layerdrop"):
        if chance := getattr(model.config.get_text_config(), name, None):
            yield f"model.config.{name} = {chance}: a layer that is left out at random gets no gradient; set it to 0"


def _check_batch(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    data_ways = plan.mesh.dp_replicate * plan.mesh.dp_shard
    unit = data_ways * batch.micro_batch_size
    if batch.global_batch_size % unit:
        yield (
            f"global_batch_size = {batch.global_batch_size} is not a multiple of dp {data_ways} x micro_batch_size "
            f"{batch.micro_batch_size} = {unit}; {_nearest_multiples(batch.global_batch_size, unit)}"
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
            f"= {batch.sequence_length}; {_nearest_multiples(batch.sequence_length, tp)}"
        )


def _check_tensor(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    if plan.mesh.tp > 1 and not plan.tensor.styles:
        yield (
            f"tensor.styles: mesh.tp = {plan.mesh.tp}, but there are no rules for a {model.config.model_type}: no "
            "shipped family plan knows it; write the rules, or set mesh.tp = 1"
        )
        return
    yield from _check_dropout(plan, model)
    heads = list(_check_heads(plan, model))
    yield from heads
    unfused = copy.deepcopy(model)
    try:
        unfuse(unfused, plan.tensor.fused)
        if plan.mesh.tp == 1:
            match_rules(unfused, plan.tensor)
        else:
            rules = resolve_rules(unfused, plan.tensor)
            yield from _check_widths(rules.styles, unfused, plan.mesh.tp, skip_attention=bool(heads))
            yield from _check_local_attributes(rules.local_attributes, unfused, plan.mesh.tp)
    except UserError as error:
        yield from error.problems


def _check_dropout(plan: ParallelPlan, model: PreTrainedModel) -> Problems:
    for name, value in attention_dropout(model).items():
        if plan.mesh.tp > 1 and not model._supports_attention_backend:
            yield (
                f"model.config.{name} = {value}: {type(model).__name__} does not know the attention interface of "
                "transformers, so with mesh.tp > 1 the heads of all processes would be dropped alike; set it to 0"
            )


def _check_heads(plan: ParallelPlan, model: PreTrainedModel) -> Problems:
    config, tp = model.config.get_text_config(), plan.mesh.tp
    for what, name in (("attention heads", "num_attention_heads"), ("key-value heads", "num_key_value_heads")):
        count = getattr(config, name, None)
        if count is not None and count % tp:
            yield (f"mesh.tp = {tp} does not divide the model's {count} {what} ({name}); tp can be {_divisors(count)}")


def _check_widths(styles: Mapping[str, Style], model: nn.Module, tp: int, *, skip_attention: bool) -> Problems:
    """Yield one problem per width that tp does not divide; embedding and head may have an uneven vocabulary."""
    seen = set()
    for name, style in styles.items():
        if style in ("embedding_rowwise", "colwise_gather_output"):
            rows = model.get_parameter(f"{name}.weight").shape[0]
            if -(-rows // tp) * (tp - 1) >= rows and rows not in seen:
                seen.add(rows)
                yield (
                    f"mesh.tp = {tp} leaves a process without any of the {rows} rows of {name}; use a smaller tp or a "
                    "larger vocabulary"
                )
        if style not in ("colwise", "rowwise") or (skip_attention and "attn" in name):
            continue
        module = model.get_submodule(name)
        width = model.get_parameter(f"{name}.weight").shape[sharded_dims(style, module)["weight"]]
        if width % tp and width not in seen:
            seen.add(width)
            yield f"mesh.tp = {tp} does not divide the width {width} of {name} ({style}); tp can be {_divisors(width)}"


def _check_local_attributes(attributes: Mapping[str, list[str]], model: nn.Module, tp: int) -> Problems:
    seen = set()
    for name, names in attributes.items():
        for attribute in names:
            value = getattr(model.get_submodule(name), attribute, None)
            what = f"{attribute!r} of {as_pattern(name)}"
            if (not isinstance(value, int) or value % tp) and what not in seen:
                seen.add(what)
                yield f"tensor.local_attributes: {what} is {value!r}, which is no number that tp = {tp} divides"


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
            check_cut(model)
    except UserError as error:
        yield from error.problems
        return
    if len(layers) < stages:
        yield (
            f"mesh.pp x stages_per_rank makes {stages} stages, but the model has only {len(layers)} layers; use fewer"
        )
    elif pipeline.split_at is not None and pipeline.layers_per_stage != "balanced":
        yield f"pipeline: layers_per_stage = {pipeline.layers_per_stage!r} and split_at are both given; leave one out"
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
    if len(names) != stages - 1:
        yield f"pipeline.split_at names {len(names)} cuts, but {stages} stages need {stages - 1}"
    elif unknown:
        yield (
            f"pipeline.split_at: {unknown[0]!r} is no layer where this model can be cut; those are {allowed[0]} to "
            f"{allowed[-1]}"
        )
    elif [allowed.index(name) for name in names] != sorted({allowed.index(name) for name in names}):
        yield f"pipeline.split_at: the cuts {list(names)} are not in the order of the model"


def _check_recompute(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    if plan.recompute.mode == "none":
        return
    try:
        layer = find_layers(model)[1][0]
    except UserError:
        # Said already, by the check of the pipeline.
        return
    if not isinstance(layer, GradientCheckpointingLayer):
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
    return f"the nearest are {below} and {below + unit}" if below else f"the nearest is {unit}"
