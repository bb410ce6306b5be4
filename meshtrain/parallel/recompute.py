"""Activation recomputation through Hugging Face's own path, which leaves every name alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from meshtrain.compat.operators import EXPENSIVE
from meshtrain.compat.transformers import set_checkpoint
from meshtrain.config.plan import RecomputePlan
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.randomness import Streams


def apply_recompute(stage: Stage, plan: RecomputePlan, streams: Streams | None = None) -> None:
    """Let every k-th decoder layer keep only what its mode says, and compute the rest again in the backward pass.

    Args:
        streams: random streams of this process, which draw again what was drawn, if there are any.
    """
    if plan.mode == "none":
        return
    for index, layer in enumerate(stage.own_layers(), start=stage.first_layer):
        assert isinstance(layer, GradientCheckpointingLayer), "the plan was not checked"
        layer.gradient_checkpointing = index % plan.every == 0
        checkpointed = _CHECKPOINTS[plan.mode]
        if streams is not None:
            checkpointed = partial(_with_streams, checkpointed, streams)
        set_checkpoint(layer, checkpointed)


def _with_streams(checkpointed: Callable, streams: Streams, forward: Callable, *args: Any) -> Any:
    return checkpointed(streams.replayed(forward), *args)


_full = partial(checkpoint, use_reentrant=False)
_selective = partial(_full, context_fn=partial(create_selective_checkpoint_contexts, list(EXPENSIVE)))
_CHECKPOINTS: dict[str, Callable] = {"full": _full, "selective": _selective}
