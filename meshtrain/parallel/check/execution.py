"""Check that a model supports recomputation, and that the rest of the plan allows it."""

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import UserError
from meshtrain.models.rotary import length_dependent
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.schedule.schedules import SCHEDULES
from meshtrain.parallel.tensor.rules import Problems


def check_recompute(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    if plan.recompute.mode == "none":
        return
    if plan.recompute.mode == "selective":
        yield from _check_selective(plan)
    try:
        layer = find_layers(model)[1][0]
    except UserError:
        # The check of the pipeline reports this.
        return
    if not isinstance(layer, GradientCheckpointingLayer):
        yield (
            f"recompute.mode = {plan.recompute.mode!r}: {type(layer).__name__} does not support recomputation; "
            "set it to 'none'"
        )


def check_rotary(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    try:
        layers, _ = find_layers(model)
    except UserError:
        # The check of the pipeline reports this.
        return
    if inside := [name for name in length_dependent(model) if name.startswith(f"{layers}.")]:
        yield (
            f"the rotary frequencies of {inside[0]} depend on the length of the sequence, and inside a layer a "
            "recomputation, or another microbatch, would find those of another length; choose a rope_type in "
            "rope_parameters that does not (not longrope, not dynamic)"
        )


def _check_selective(plan: ParallelPlan) -> Problems:
    if plan.compile.enabled and plan.mesh.tp > 1:
        yield (
            "recompute.mode = 'selective' with compile.enabled and mesh.tp > 1: attention and MLP are then compiled "
            "separately, and torch cannot select the results to keep inside them; set recompute.mode = 'full', or "
            "compile.enabled = false"
        )
    if plan.mesh.pp > 1 and SCHEDULES[plan.pipeline.schedule].splits_backward:
        yield (
            f"recompute.mode = 'selective' with pipeline.schedule = {plan.pipeline.schedule!r}: the schedule runs back "
            "through a layer twice, but torch returns what selective recomputation has kept only once; set "
            "recompute.mode = 'full', or use another schedule"
        )
