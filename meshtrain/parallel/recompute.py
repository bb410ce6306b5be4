"""Activation recomputation through Hugging Face's own path, which leaves every name alone."""

from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from meshtrain.config.plan import RecomputePlan
from meshtrain.parallel.cut import Stage


def apply_recompute(stage: Stage, plan: RecomputePlan) -> None:
    """Let every k-th decoder layer keep only its input, and compute the rest again in the backward pass."""
    if plan.mode == "none":
        return
    for index, layer in enumerate(stage.own_layers(), start=stage.first_layer):
        assert isinstance(layer, GradientCheckpointingLayer), "the plan was not checked"
        layer.gradient_checkpointing = index % plan.every == 0
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
