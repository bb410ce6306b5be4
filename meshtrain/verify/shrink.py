"""Small meshes and plans for a proof: few processes and layers, float64, every axis."""

import math
import re
from collections.abc import Iterator, Sequence

from meshtrain.config.lora import LoraConfig
from meshtrain.config.mesh import AXES, CP, DP_SHARD, EP, FSDP_AXES, TP, MeshPlan
from meshtrain.config.plan import CompilePlan, LossPlan, ParallelPlan, PipelinePlan, PrecisionPlan
from meshtrain.models.tiny import EXPERTS, HEADS
from meshtrain.parallel.shard import needs_fsdp

MAX_RANKS = 8
# This many axes can be 2 wide at once.
MOST_WIDE_AXES = int(math.log2(MAX_RANKS))
MAX_LAYERS = 16
# Chunks end inside of the rows of a microbatch, and the last one is shorter.
CHUNK_TOKENS = 5
# Rows of A in an adapter: of a real rank, a tiny model would have more than features.
MAX_RANK = 4
PROOF = PrecisionPlan(parameters="float64", compute="float64", reduce="float64")


def shrink_mesh(mesh: MeshPlan, *, most_tp: int = HEADS) -> list[MeshPlan]:
    """Return meshes of at most MAX_RANKS processes that together have every axis of `mesh`.

    Each axis is at least 2 wide in one of them. One mesh is enough for up to three axes. With more
    axes, each mesh leaves out some, but never all of those that FSDP2 shards over.

    Args:
        most_tp: largest number of processes that can share a layer of the tiny model.
    """
    degrees = {axis: 2 if degree == -1 else min(degree, MAX_RANKS) for axis, degree in mesh.degrees.items()}
    # The numbers of experts and of heads of a tiny model are powers of two.
    degrees[EP] = max(degree for degree in (1, 2, EXPERTS) if degree <= degrees[EP])
    degrees[TP] = max(degree for degree in (1, 2, HEADS) if degree <= min(degrees[TP], most_tp))
    wide = [axis for axis in AXES if degrees[axis] > 1]
    if len(wide) > MOST_WIDE_AXES:
        without = [mesh.model_copy(update={axis: 1}) for axis in wide if axis in _left_out(wide)]
        return [small for fewer in without for small in shrink_mesh(fewer, most_tp=most_tp)]
    while math.prod(degrees.values()) > MAX_RANKS:
        widest = max(wide, key=lambda axis: degrees[axis])
        degrees[widest] = max(2, degrees[widest] // 2)
    return [MeshPlan(**degrees)]


def _left_out(wide: Sequence[str]) -> set[str]:
    """Return the axes of which each mesh can leave out one."""
    sharding = set(wide) & set(FSDP_AXES)
    return {DP_SHARD, CP} if len(sharding) == MOST_WIDE_AXES else set(wide) - sharding


def shrink_plan(plan: ParallelPlan, mesh: MeshPlan) -> ParallelPlan:
    """Return the plan for a tiny model on a small mesh, in float64."""
    return plan.model_copy(
        update={
            "mesh": mesh,
            "pipeline": _shrink_pipeline(plan.pipeline, mesh.pp),
            "precision": PROOF,
            # With one number format and without sharding FSDP2 is not used, although the run may
            # use it for its two formats. Offload makes it used, and changes nothing else on a CPU.
            "shard": plan.shard.model_copy(update={"offload": "cpu" if needs_fsdp(plan) else plan.shard.offload}),
            # Inductor's generated code reorders sums. With aot_eager the same code is compiled, and
            # cut alike.
            "compile": CompilePlan(enabled=plan.compile.enabled, backend="aot_eager"),
            "tensor": plan.tensor.model_copy(update={"async_tp": False}),
            "loss": LossPlan(chunk_tokens=min(plan.loss.chunk_tokens, CHUNK_TOKENS))
            if plan.loss.chunk_tokens != "auto"
            else plan.loss,
        }
    )


def shrink_lora(lora: LoraConfig) -> LoraConfig:
    """Return the adapters for a tiny model: few rows, on every layer, without dropout."""
    if lora.rank is None:
        return lora
    rank = min(lora.rank, MAX_RANK)
    targets = lora.target_modules
    return lora.model_copy(
        update={
            "rank": rank,
            "alpha": None if lora.alpha is None else lora.alpha * rank / lora.rank,
            "dropout": 0.0,
            "target_modules": targets if isinstance(targets, str) else _of_all_layers(targets),
            "modules_to_save": _of_all_layers(lora.modules_to_save),
        }
    )


def _of_all_layers(targets: Sequence[str]) -> list[str]:
    """Return targets without the numbers of layers, which a tiny model may not have."""
    return list(dict.fromkeys(re.sub(r"^(.*\.)?\d+\.", "", target) for target in targets))


def num_layers(plan: ParallelPlan) -> int:
    """Return the number of decoder layers that a tiny model needs for a shrunk plan."""
    layers = plan.pipeline.layers_per_stage
    if isinstance(layers, list):
        return sum(layers)
    return max(4, plan.mesh.pp * plan.pipeline.stages_per_rank)


def deepen(plan: ParallelPlan) -> Iterator[tuple[ParallelPlan, int]]:
    """Yield a shrunk plan for increasing numbers of decoder layers, with the number.

    The first number is the smallest that the plan needs. Layers that are counted per stage stay as
    uneven as they are.
    """
    layers, fewest = plan.pipeline.layers_per_stage, num_layers(plan)
    if not isinstance(layers, list):
        yield from ((plan, count) for count in range(fewest, max(fewest, MAX_LAYERS) + 1))
        return
    for times in range(1, max(1, MAX_LAYERS // fewest) + 1):
        more = plan.pipeline.model_copy(update={"layers_per_stage": [times * count for count in layers]})
        yield plan.model_copy(update={"pipeline": more}), times * fewest


def _shrink_pipeline(pipeline: PipelinePlan, pp: int) -> PipelinePlan:
    stages = pp * pipeline.stages_per_rank
    layers = pipeline.layers_per_stage
    if isinstance(layers, list):
        # Keep the stages uneven: 1 layer for the emptier stages, 2 for the fuller. A stage that has
        # only the head stays so.
        few = [min(count, 1 + (count > min(layers))) for count in layers[: stages - 1] + layers[-1:]]
        return pipeline.model_copy(update={"layers_per_stage": few, "split_at": None})
    if pipeline.split_at is not None:
        return pipeline.model_copy(update={"layers_per_stage": [2] + [1] * (stages - 1), "split_at": None})
    return pipeline
