"""Checks of a head and loss in chunks."""

from transformers import PreTrainedModel

from meshtrain.config.plan import LossPlan, ParallelPlan
from meshtrain.errors import ModelError
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.head.proof import find_base
from meshtrain.parallel.head.size import auto_chunk_tokens
from meshtrain.parallel.tensor.rules import Problems


def check_head(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    """Yield what keeps the head of a model from running in the chunks that a plan asks for."""
    if plan.loss.chunk_tokens not in ("auto", 0):
        yield from head_problems(model)


def head_problems(model: PreTrainedModel) -> Problems:
    """Yield why the head of a model cannot run in chunks."""
    try:
        find_base(model)
    except ModelError as error:
        yield from error.problems


def resolve_loss(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> LossPlan:
    """Return the loss of a plan without `auto`: 0 too for a class whose head cannot run in chunks.

    Args:
        plan: with the degrees of its mesh.
        model: stock, on the meta device.
        batch: shape of the batches.
    """
    if plan.loss.chunk_tokens != "auto":
        return plan.loss
    tokens = auto_chunk_tokens(plan, model, batch.micro_batch_size * batch.sequence_length)
    return LossPlan(chunk_tokens=0 if tokens and any(True for _ in head_problems(model)) else tokens)
