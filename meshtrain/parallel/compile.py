"""Apply torch.compile to each layer in place, so that no name changes."""

from torch import nn

from meshtrain.config.plan import ParallelPlan
from meshtrain.parallel.cut.stage import Stage


def apply_compile(stage: Stage, plan: ParallelPlan) -> None:
    """Compile the decoder layers of a stage.

    With tensor parallelism and recomputation together, attention and MLP are compiled separately.
    The reason is that torch cannot save a DTensor for the recomputation of a compiled block.
    """
    if not plan.compile.enabled:
        return
    by_parts = plan.mesh.tp > 1 and plan.recompute.mode != "none"
    for layer in stage.own_layers():
        for block in _blocks(layer) if by_parts else [layer]:
            block.compile(backend=plan.compile.backend)


def _blocks(layer: nn.Module) -> list[nn.Module]:
    """Return the children that hold projections."""
    return [child for child in layer.children() if any(parameter.dim() >= 2 for parameter in child.parameters())]
