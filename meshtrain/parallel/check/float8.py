"""Checks of matrix products in float8, and the layers that stay in bfloat16 by default."""

from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan, PrecisionPlan
from meshtrain.errors import Problem, UserError, name_some
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.float8.layers import float8_layers_of, skip_patterns
from meshtrain.parallel.tensor.rules import Problems


def check_float8(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    """Yield a problem if no linear layer can compute in float8, or a pattern matches nothing."""
    if plan.precision.compute != "float8":
        return
    try:
        layers = float8_layers_of(model, plan)
    except UserError:
        # The check of the tensor rules reports this.
        return
    yield from layers.unused
    if not layers.chosen:
        reasons = "; ".join(f"{reason}: {name_some(names, limit=2)}" for reason, names in layers.reasons().items())
        yield Problem(
            "precision.compute = 'float8': no linear layer of the decoder layers can compute in it "
            f"({reasons or 'there is none'})",
            "compute in bfloat16, or change precision.float8.skip",
        )


def resolve_float8(plan: ParallelPlan, model: PreTrainedModel) -> PrecisionPlan:
    """Return the precision of a plan, with the patterns of all modules that float8 leaves out."""
    precision = plan.precision
    if precision.compute != "float8":
        return precision
    float8 = precision.float8.model_copy(update={"skip": skip_patterns(model, plan)})
    return precision.model_copy(update={"float8": float8})
