"""How the decoder layers of a stage run: recomputed in the backward pass, and compiled.

Both work in place and change no names. Recomputation is Hugging Face's own mechanism.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from meshtrain.compat.compile import PIPELINED_PRODUCTS
from meshtrain.compat.operators import EXPENSIVE
from meshtrain.compat.transformers import set_checkpoint
from meshtrain.config.plan import ParallelPlan, RecomputePlan
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.randomness import Streams


def apply_recompute(stage: Stage, plan: RecomputePlan, streams: Streams | None = None) -> None:
    """Make every k-th decoder layer recompute activations in the backward pass.

    Args:
        stage: changed in place.
        plan: `mode` decides what these layers keep from the forward pass, and `every` is k.
        streams: the random streams of this process, if it has any. Recomputation replays them.
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


def apply_compile(stage: Stage, plan: ParallelPlan, *, watches_routers: bool) -> None:
    """Compile the decoder layers of a stage.

    With recomputation and tensor parallelism together, attention and MLP are compiled separately.
    The reason is that torch cannot save a DTensor for the recomputation of a compiled block. With
    recomputation and documents that attention computes one by one, experts on several ranks, or
    hooks on routers, so are they too: the graph ends there then, and torch would compile nothing of
    a layer whose recomputation it cannot trace to its end.

    Args:
        stage: whose layers are compiled in place.
        plan: resolved.
        watches_routers: whether losses of routers are computed, or the tokens of experts counted.
    """
    if not plan.compile.enabled:
        return
    ends_early = plan.mesh.tp > 1 or plan.mesh.ep > 1 or plan.attention.documents == "segments" or watches_routers
    by_parts = plan.recompute.mode != "none" and ends_early
    options = {"options": PIPELINED_PRODUCTS} if plan.tensor.async_tp else {}
    for layer in stage.own_layers():
        for block in _blocks(layer) if by_parts else [layer]:
            block.compile(backend=plan.compile.backend, **options)


def _blocks(layer: nn.Module) -> list[nn.Module]:
    """Return the children that hold projections."""
    return [child for child in layer.children() if any(parameter.dim() >= 2 for parameter in child.parameters())]
