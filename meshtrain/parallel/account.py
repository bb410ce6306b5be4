"""Who holds what under a plan: stages, layers, parameters and bytes of every process, counted without any of them."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from meshtrain.config.mesh import STAGE_AXES
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ModelError
from meshtrain.models.flops import flops_of_layers, flops_of_modules
from meshtrain.models.fused import unfuse
from meshtrain.parallel.cut.probe import find_layers, probe_structure
from meshtrain.parallel.cut.stage import Stage, cut
from meshtrain.parallel.schedule.schedules import stage_owners
from meshtrain.parallel.tensor.rules import resolve_rules

ADAM_STATES = 2


@dataclass(frozen=True)
class StageShare:
    """One stage, and what each of the processes that hold it keeps of it.

    Attributes:
        stage: its index.
        pp_rank: the coordinate of its processes on the pp axis.
        ranks: their numbers.
        layers: first layer, and the one behind the last.
        has_embedding: whether it takes input ids.
        has_head: whether it gives logits.
        num_parameters: of the whole stage; a tied head copy counts.
        num_local_parameters: at most so many on one process.
        parameter_bytes: on one process.
        gradient_bytes: on one process, sharded as the parameters are.
        optimizer_bytes: on one process, two AdamW moments.
    """

    stage: int
    pp_rank: int
    ranks: tuple[int, ...]
    layers: tuple[int, int]
    has_embedding: bool
    has_head: bool
    num_parameters: int
    num_local_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def account(model: PreTrainedModel, plan: ParallelPlan) -> list[StageShare]:
    """Return what every stage is made of.

    Args:
        model: the stock model on meta; it is not changed.
        plan: resolved.
    """
    whole = copy.deepcopy(model)
    unfuse(whole, plan.tensor.fused)
    dims = resolve_rules(whole, plan.tensor).sharded_dims if plan.mesh.tp > 1 else {}
    layers = plan.pipeline.layers_per_stage
    assert isinstance(layers, list), "the plan is not resolved"
    stages = cut(whole, layers, range(len(layers)))
    owners = stage_owners(plan.pipeline, plan.mesh.pp)
    return [_share(stage, owner, plan, dims) for stage, owner in zip(stages, owners, strict=True)]


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Return the FLOPs of the whole model, forward and backward, per token, without what recomputation adds."""
    _, layers = find_layers(model)
    return sum(flops_around_layers(model)) + sum(flops_of_layers(layers, model.config, sequence_length))


def flops_around_layers(model: PreTrainedModel) -> tuple[float, float]:
    """Return the FLOPs before and after the layers, forward and backward, per token.

    Of a model that cannot be cut only the head is known.
    """
    try:
        anatomy = probe_structure(model)
    except ModelError:
        return 0.0, flops_of_modules([model.get_output_embeddings()])
    before, after = (flops_of_modules(map(model.get_submodule, names)) for names in (anatomy.before, anatomy.after))
    return before, after


def _share(stage: Stage, pp_rank: int, plan: ParallelPlan, dims: Mapping[str, int]) -> StageShare:
    parameters = dict(stage.model.named_parameters())
    local = sum(math.prod(_local_shape(stage.model, name, plan, dims)) for name in parameters)
    width = torch.finfo(getattr(torch, plan.precision.parameters)).bits // 8
    per_stage = plan.mesh.degree(*STAGE_AXES)
    return StageShare(
        stage=stage.index,
        pp_rank=pp_rank,
        ranks=tuple(range(pp_rank * per_stage, (pp_rank + 1) * per_stage)),
        layers=(stage.first_layer, stage.last_layer),
        has_embedding=stage.is_first,
        has_head=stage.is_last,
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        num_local_parameters=local,
        parameter_bytes=local * width,
        gradient_bytes=local * width,
        optimizer_bytes=local * width * ADAM_STATES,
    )


def _local_shape(model: nn.Module, name: str, plan: ParallelPlan, dims: Mapping[str, int]) -> list[int]:
    """Return the shape of the largest piece of a parameter: the pieces are equal, but the last ones may be smaller."""
    shape = list(model.get_parameter(name).shape)
    dim = dims.get(name)
    if dim is not None:
        shape[dim] = -(-shape[dim] // plan.mesh.tp)
    # FSDP2 shards the first dimension of what tensor parallelism has left.
    shape[:1] = [-(-rows // plan.mesh.fsdp_degree) for rows in shape[:1]]
    return shape
