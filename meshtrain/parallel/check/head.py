"""Checks of a head and loss in chunks, and the size of the chunks."""

from transformers import PreTrainedModel

from meshtrain.config.plan import LossPlan, ParallelPlan
from meshtrain.errors import ModelError, PlanError, Problem
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.cut.borders import Stages, find_routes
from meshtrain.parallel.cut.probe import probe_structure
from meshtrain.parallel.head.proof import find_base
from meshtrain.parallel.head.size import auto_chunk_tokens
from meshtrain.parallel.tensor.rules import Problems


def check_head(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    """Yield what keeps the head of a model from running in the chunks that a plan asks for."""
    if plan.loss.chunk_tokens not in ("auto", 0) and not batch.takes_chunks:
        yield Problem(
            f"loss.chunk_tokens = {plan.loss.chunk_tokens} computes the loss in chunks of tokens, and that of "
            "preference.loss or distillation.teacher needs all logits of a microbatch",
            "leave it out",
        )
    elif plan.loss.chunk_tokens not in ("auto", 0):
        try:
            find_base(model)
        except ModelError as error:
            yield from error.problems


def resolve_loss(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape, *, runs_model: bool = True) -> LossPlan:
    """Return the loss of a plan without `auto`: 0 too for a class whose head cannot run in chunks.

    Args:
        plan: with the degrees of its mesh and the layers of each stage.
        model: stock, on the meta device.
        batch: shape of the batches.
        runs_model: as for `resolve_plan`.

    Raises:
        PlanError: if the last stage cannot run its head in the chunks that the plan asks for.
    """
    chunk_tokens = plan.loss.chunk_tokens
    if chunk_tokens == "auto" and not batch.takes_chunks:
        chunk_tokens = 0
    elif chunk_tokens == "auto":
        chunk_tokens = auto_chunk_tokens(plan, model, batch.micro_batch_size * batch.sequence_length // plan.mesh.cp)
    if not chunk_tokens:
        return LossPlan(chunk_tokens=0)
    try:
        problems = [*_check_last_border(plan, model, find_base(model))] if runs_model else []
    except ModelError as error:
        problems = [*error.problems]
    if problems and plan.loss.chunk_tokens != "auto":
        raise PlanError(problems)
    return LossPlan(chunk_tokens=0 if problems else chunk_tokens)


def find_base_apart(plan: ParallelPlan, model: PreTrainedModel) -> str | None:
    """Return the base model of a model whose head may run later; None if it may not.

    Args:
        plan: resolved.
        model: stock, on the meta device.
    """
    try:
        base = find_base(model)
    except ModelError:
        return None
    return None if _received_outside(plan, model, base) else base


def _check_last_border(plan: ParallelPlan, model: PreTrainedModel, base: str) -> Problems:
    """Yield a problem if the last stage receives what its class uses behind the base model.

    A chunk would need a part of that.
    """
    if outside := _received_outside(plan, model, base):
        yield Problem(
            f"loss.chunk_tokens = {plan.loss.chunk_tokens}: {outside[0]}, which is outside of {base}, uses what the "
            "last stage receives from the stage before",
            "set it to 0, or give the last stage a decoder layer",
        )


def _received_outside(plan: ParallelPlan, model: PreTrainedModel, base: str) -> list[str]:
    """Return the parts outside of a base model that use what the last stage receives."""
    if plan.mesh.pp == 1:
        return []
    structure = probe_structure(model)
    calls = structure.trace.calls
    *_, last = find_routes(structure.trace, Stages(structure.trace, plan.pipeline.layer_counts, structure.layers_name))
    return [calls[place.call].name for place in last.placed if not calls[place.call].name.startswith(f"{base}.")]
