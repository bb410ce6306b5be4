"""Check that attention can see full sequences over the cp axis, and choose how."""

import inspect
from math import lcm

import torch
from transformers import PreTrainedModel

from meshtrain.config.plan import ContextMethod, ContextOrder, ContextPlan, ParallelPlan
from meshtrain.errors import ModelError, Problem
from meshtrain.models.layer_config import values_in_layers
from meshtrain.parallel.check.batch import BatchShape, nearest_multiples
from meshtrain.parallel.context.attention import num_exchanged_keys
from meshtrain.parallel.context.columns import Columns
from meshtrain.parallel.context.mixing import mixing_blocks
from meshtrain.parallel.context.positions import skips_padding
from meshtrain.parallel.stage_attention import why_attention_stays
from meshtrain.parallel.tensor.head_share import Heads, heads_of, uneven_heads
from meshtrain.parallel.tensor.rules import Problems


def check_context(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    """Yield why a class, the heads or the lengths do not fit cp."""
    cp = plan.mesh.cp
    if cp == 1:
        return
    if reason := why_attention_stays(model):
        yield Problem(f"mesh.cp = {cp}: {reason}", "use attention by 'sdpa' or 'eager', or cp = 1")
    elif reason := _refusal(model):
        yield Problem(f"mesh.cp = {cp}: {reason}", "use cp = 1")
    heads = _heads_of_process(plan, model)
    if plan.context.method == "ulysses" and (heads is None or heads.queries % cp):
        found = "their number differs between layers or processes" if heads is None else f"there are {heads.queries}"
        yield Problem(
            f"context.method = 'ulysses' divides the attention heads of a process over cp = {cp}, but {found}",
            "set it to 'all_gather'",
        )
    if plan.context.method == "ulysses" and plan.context.order == "head_tail":
        yield Problem(
            "context.order = 'head_tail' with context.method = 'ulysses': each process then computes attention for the "
            "full sequence, so the order changes nothing",
            "leave it out",
        )
    yield from _check_lengths(plan, batch)


def _refusal(model: PreTrainedModel) -> str | None:
    """Return why a class cannot compute parts of sequences; None if it can."""
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        name = type(model).__name__
        return f"{name} takes no position_ids, so it would compute each part as a whole sequence"
    try:
        mixing_blocks(model)
        skips_padding(model)
    except ModelError as error:
        return error.problems[0].found
    return None


def resolve_context(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> ContextPlan:
    """Return the method and the order of a checked plan, without `auto`."""
    wanted, cp = plan.context, plan.mesh.cp
    if cp == 1:
        return ContextPlan()
    heads = _heads_of_process(plan, model)
    method: ContextMethod = "ulysses" if heads is not None and heads.queries % cp == 0 else "all_gather"
    if wanted.method != "auto":
        method = wanted.method
    plan = plan.model_copy(update={"context": ContextPlan(method=method, order="head_tail")})
    fits_two = method == "all_gather" and not any(_check_lengths(plan, batch))
    order: ContextOrder = "head_tail" if fits_two else "contiguous"
    if wanted.order != "auto":
        order = wanted.order
    return ContextPlan(method=method, order=order)


def context_bytes(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape, method: ContextMethod) -> int | None:
    """Return how many bytes attention gets from other ranks of cp, in a layer and forward pass.

    Args:
        plan: resolved.
        model: whose heads are counted.
        batch: whose microbatches are counted.
        method: for which to count.

    Returns:
        The number for one microbatch; None if layers, processes, or keys and values differ.
    """
    heads, cp = _heads_of_process(plan, model), plan.mesh.cp
    widths = values_in_layers(model.config.get_text_config(), "head_dim")
    if heads is None or len(widths) > 1 or hasattr(model.config.get_text_config(), "v_head_dim"):
        return None
    config = model.config.get_text_config()
    width = widths[0] or config.hidden_size // config.num_attention_heads
    sent = 2 * heads.keys * (cp - 1)
    if method == "ulysses":
        sent = 2 * (heads.queries + num_exchanged_keys(heads.queries, heads.keys, cp)) * (cp - 1) // cp
    tokens = batch.micro_batch_size * batch.sequence_length // cp
    dtype: torch.dtype = getattr(torch, plan.precision.activations)
    return sent * width * tokens * dtype.itemsize


def _heads_of_process(plan: ParallelPlan, model: PreTrainedModel) -> Heads | None:
    """Return the numbers of heads on each process of tp; None if they differ."""
    tp, heads = plan.mesh.tp, heads_of(model.config.get_text_config())
    if heads is None or uneven_heads(model.config.get_text_config(), tp) is not None:
        return None
    return Heads(heads.queries // tp, heads.keys // tp)


def length_unit(plan: ParallelPlan) -> int:
    """Return the number that divides the length of every sequence, in tokens."""
    order = "contiguous" if plan.context.order == "auto" else plan.context.order
    unit = Columns(order, plan.mesh.cp).unit
    return lcm(unit, plan.mesh.cp * plan.mesh.tp) if plan.tensor.sequence_parallel else unit


def what_divides(plan: ParallelPlan) -> str:
    """Return the settings that divide each sequence, in words."""
    others = []
    if plan.context.order == "head_tail":
        others.append("context.order = 'head_tail'")
    if plan.tensor.sequence_parallel and plan.mesh.tp > 1:
        others.append(f"mesh.tp = {plan.mesh.tp} (sequence_parallel)")
    return f"mesh.cp = {plan.mesh.cp}" + (f" with {' and '.join(others)}" if others else "")


def _check_lengths(plan: ParallelPlan, batch: BatchShape) -> Problems:
    unit = length_unit(plan)
    lengths = {"sequence_length": batch.sequence_length, "pad_to_multiple_of": batch.width_multiple}
    for key, length in lengths.items():
        if length is not None and length % unit:
            yield Problem(
                f"{what_divides(plan)} divides each sequence into {unit} equal parts, which is not possible for "
                f"data.{key} = {length}",
                nearest_multiples(length, unit),
            )
