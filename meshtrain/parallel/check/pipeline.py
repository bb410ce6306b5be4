"""Pipeline stages: schedules, cuts, and layers for every stage."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import UserError
from meshtrain.models.flops import head_flops_per_token, layer_flops_per_token
from meshtrain.parallel.anatomy import find_layers
from meshtrain.parallel.balance import balanced_layers, even_layers, layers_split_at
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.cut import check_cut
from meshtrain.parallel.rules import Problems


def check_pipeline(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
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
    costs = [layer_flops_per_token(layer, model.config, batch.sequence_length) for layer in layers]
    return balanced_layers(costs, head_flops_per_token(model.get_output_embeddings()), stages)
