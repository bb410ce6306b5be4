"""Who holds what under a plan: stages, layers, parameters and bytes of every process, counted without any of them."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan, Style
from meshtrain.models.fused import unfuse
from meshtrain.parallel.cut import Stage, cut
from meshtrain.parallel.pipeline import stage_owners
from meshtrain.parallel.tensor import resolve_rules

ADAM_STATES = 2
SHARDED: tuple[Style, ...] = ("colwise", "colwise_gather_output", "rowwise", "embedding_rowwise")


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
    styles = dict(resolve_rules(whole, plan.tensor).styles) if plan.mesh.tp > 1 else {}
    layers = plan.pipeline.layers_per_stage
    assert isinstance(layers, list), "the plan is not resolved"
    stages = cut(whole, layers, range(len(layers)))
    owners = stage_owners(len(layers), plan.mesh.pp)
    return [_share(stage, owner, plan, styles) for stage, owner in zip(stages, owners, strict=True)]


def _share(stage: Stage, pp_rank: int, plan: ParallelPlan, styles: dict[str, Style]) -> StageShare:
    shapes = [
        (parameter.shape, styles.get(name.rpartition(".")[0]) in SHARDED)
        for name, parameter in stage.model.named_parameters()
    ]
    local = sum(_local_numel(shape, plan.mesh.tp if over_tp else 1, plan.mesh.dp_shard) for shape, over_tp in shapes)
    width = torch.finfo(getattr(torch, plan.precision.parameters)).bits // 8
    per_stage = plan.mesh.dp_replicate * plan.mesh.dp_shard * plan.mesh.tp
    return StageShare(
        stage=stage.index,
        pp_rank=pp_rank,
        ranks=tuple(range(pp_rank * per_stage, (pp_rank + 1) * per_stage)),
        layers=(stage.first_layer, stage.last_layer),
        has_embedding=stage.is_first,
        has_head=stage.is_last,
        num_parameters=sum(math.prod(shape) for shape, _ in shapes),
        num_local_parameters=local,
        parameter_bytes=local * width,
        gradient_bytes=local * width,
        optimizer_bytes=local * width * ADAM_STATES,
    )


def _local_numel(shape: Sequence[int], tp: int, dp_shard: int) -> int:
    # FSDP2 shards the first dimension in equal pieces, the last ones shorter.
    whole = math.prod(shape)
    rows = shape[0] if shape else 1
    per_tp = -(-whole // tp)
    return -(-rows // (tp * dp_shard)) * (whole // rows) if tp == 1 else -(-per_tp // dp_shard)
