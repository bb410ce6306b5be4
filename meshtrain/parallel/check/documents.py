"""Choose how attention keeps packed documents apart."""

from transformers import PreTrainedModel

from meshtrain.config.plan import AttentionPlan, ParallelPlan
from meshtrain.errors import Problem
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.documents.proof import why_not_alone
from meshtrain.parallel.stage_attention import why_attention_stays
from meshtrain.parallel.tensor.rules import Problems


def check_documents(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    """Yield why attention cannot compute each document alone, if the plan asks for it."""
    if batch.separates and plan.attention.documents == "segments" and (reason := why_mask(plan, model)):
        yield Problem(f"attention.documents = 'segments': {reason}", "set it to 'auto' or 'mask'")


def resolve_documents(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> AttentionPlan:
    """Return the choice of a checked plan, without `auto` where documents are separate."""
    if not batch.separates:
        return AttentionPlan()
    if plan.attention.documents != "auto":
        return plan.attention
    return AttentionPlan(documents="mask" if why_mask(plan, model) else "segments")


def why_mask(plan: ParallelPlan, model: PreTrainedModel) -> str | None:
    """Return why attention needs a mask of all pairs of a row; None if it does not."""
    if plan.compile.enabled and plan.recompute.mode == "selective":
        return (
            "with compile.enabled, the parts of a layer around attention are compiled, and recompute.mode = "
            "'selective' cannot select the results to keep inside of them"
        )
    return why_attention_stays(model) or why_not_alone(model)
