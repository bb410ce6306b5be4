"""Recomputation: which models know it."""

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import UserError
from meshtrain.parallel.anatomy import find_layers
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.rules import Problems


def check_recompute(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
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
