"""Check the tensor rules of a plan, and the heads and widths that tp must divide.

The rules must sum all partial gradients, and cut only what can be cut.
"""

import copy
import math
from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan, Style
from meshtrain.errors import Problem, UserError
from meshtrain.models.fused import unfuse
from meshtrain.models.layer_config import values_in_layers
from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.tensor.dataflow.checks import where_shares_differ
from meshtrain.parallel.tensor.flow import follow_heads
from meshtrain.parallel.tensor.head_share import heads_of, local_value, uneven_heads
from meshtrain.parallel.tensor.origins import HIDDEN_STATES, Flow
from meshtrain.parallel.tensor.rules import (
    Problems,
    TensorRules,
    match_rules,
    may_have_rule,
    resolve_rules,
    sharded_dims,
    unchecked_rules,
)
from meshtrain.parallel.tensor.shared_heads import divides_uneven_heads
from meshtrain.parallel.tensor.split_flow import why_not_split
from meshtrain.parallel.tensor.styles import STYLES

# What is wrong with a module, and what to do.
MISUSED = (
    "is not called: with this configuration the model computes with its weight elsewhere, so it cannot be cut",
    "set mesh.tp = 1",
)
JOINT = (
    "computes over all heads at once, and each process has a part of them",
    "keep the projections around it whole ('colwise_gather_output' and 'rowwise_split_input'), or set mesh.tp = 1",
)
NOT_PER_HEAD = "has parameters for every head, and each process has a part of the heads", "make it 'per_head'"
PARTIAL = (
    "works on the heads, or the width, of one process, so its gradient must be summed",
    "make it 'replicated_with_grad_allreduce'",
)
MIXED = (
    "is used both on the heads, or the width, of one process and on full tensors, so its gradient would be partial or "
    "count several times",
    "set mesh.tp = 1",
)
# Of a single parameter that no rule can match.
UNNAMED = "call it neither 'weight' nor 'bias', so that it can have a rule, or set mesh.tp = 1"
TWICE = "gets the same input on every process, so its gradient would count several times", "make it 'replicate'"


def check_tensor(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    if plan.mesh.tp > 1 and not plan.tensor.styles:
        # There are no rules, and nothing to derive them from. The derivation has reported this.
        return
    heads = list(_check_heads(plan, model))
    yield from heads
    unfused = copy.deepcopy(model)
    try:
        unfuse(unfused, plan.tensor.fused)
        if plan.mesh.tp == 1:
            match_rules(unfused, plan.tensor)
        else:
            rules = resolve_rules(unfused, plan.tensor)
            problems = [
                *_check_widths(rules.styles, unfused, plan.mesh.tp, skip_attention=bool(heads)),
                *_check_blocks(rules.styles, model, plan.mesh.tp),
                *_check_experts(rules, unfused, plan.mesh.tp),
                *_check_local_attributes(rules.local_attributes, unfused, plan.mesh.tp),
            ]
            yield from problems
            if not heads and not problems:
                yield from [*_check_flow(unfused, rules, plan)] or _check_shares(plan, model)
    except UserError as error:
        yield from error.problems


def _check_heads(plan: ParallelPlan, model: PreTrainedModel) -> Problems:
    tp = plan.mesh.tp
    if heads_of(model.config) is not None and not divides_uneven_heads(plan, model):
        return
    for what, name in (
        ("attention heads", "num_attention_heads"),
        ("key-value heads", "num_key_value_heads"),
        # Falcon has this name.
        ("key-value heads", "num_kv_heads"),
    ):
        for count in values_in_layers(model.config, name):
            if isinstance(count, int) and count % tp:
                yield Problem(
                    f"mesh.tp = {tp} does not divide the model's {count} {what} ({name})",
                    _set_tp(_divisors(count)),
                )


def _check_shares(plan: ParallelPlan, model: PreTrainedModel) -> Problems:
    """Yield where processes would not compute right with their shares of uneven heads."""
    if uneven_heads(model.config, plan.mesh.tp) is None:
        return
    tensor = plan.tensor
    module = where_shares_differ(
        model, plan.mesh.tp, tensor.fused, lambda tiny: unchecked_rules(tiny, match_rules(tiny, tensor))
    )
    if module is not None:
        yield Problem(
            f"mesh.tp = {plan.mesh.tp} does not divide the heads of {type(model).__name__}, and processes with "
            f"their shares would not compute {as_pattern(module)} as one does",
            "use a tp that divides them",
        )


def _check_widths(styles: Mapping[str, Style], model: nn.Module, tp: int, *, skip_attention: bool) -> Problems:
    """Yield one problem per width that tp does not divide.

    The vocabulary of embedding and head may be uneven, but every process needs a row.
    """
    seen = set()
    for name, style in styles.items():
        row = STYLES[style]
        if row.may_be_uneven:
            rows = model.get_parameter(f"{name}.weight").shape[0]
            if -(-rows // tp) * (tp - 1) >= rows and rows not in seen:
                seen.add(rows)
                yield Problem(
                    f"mesh.tp = {tp} leaves a process without any of the {rows} rows of {name}",
                    "use a smaller tp or a larger vocabulary",
                )
        if row.may_be_uneven or row.shards not in ("outputs", "inputs") or (skip_attention and "attn" in name):
            continue
        module = model.get_submodule(name)
        width = model.get_parameter(f"{name}.weight").shape[sharded_dims(style, module)["weight"]]
        if width % tp and width not in seen:
            seen.add(width)
            yield Problem(
                f"mesh.tp = {tp} does not divide the width {width} of {name} ({style})", _set_tp(_divisors(width))
            )


def _check_blocks(styles: Mapping[str, Style], model: PreTrainedModel, tp: int) -> Problems:
    if not any(STYLES[style].four_blocks for style in styles.values()):
        return
    heads = model.config.get_text_config().num_attention_heads
    if 4 % tp or heads % (4 * tp):
        yield Problem(
            f"mesh.tp = {tp} does not divide the four blocks of {heads} attention heads that {type(model).__name__} "
            "computes by",
            _set_tp([way for way in (1, 2, 4) if heads % (4 * way) == 0] or [1]),
        )


def _check_experts(rules: TensorRules, model: nn.Module, tp: int) -> Problems:
    seen = set()
    for name, dim in rules.sharded_dims.items():
        parameter = model.get_parameter(name)
        if parameter.dim() > 2 and parameter.shape[dim] % tp and parameter.shape not in seen:
            seen.add(parameter.shape)
            size = parameter.shape[dim]
            yield Problem(
                f"mesh.tp = {tp} does not divide dimension {dim} ({size}) of {name}", _set_tp(_divisors(size))
            )


def _check_local_attributes(attributes: Mapping[str, list[str]], model: PreTrainedModel, tp: int) -> Problems:
    seen, heads = set(), uneven_heads(model.config, tp)
    for name, names in attributes.items():
        for attribute in names:
            value = read_attribute(model.get_submodule(name), attribute)
            what = f"{attribute!r} of {as_pattern(name)}"
            if local_value(value, heads, 0, tp) is None and what not in seen:
                seen.add(what)
                yield Problem(
                    f"tensor.local_attributes: {what} is {value!r}, which is not a number that tp = {tp} divides",
                    "name another attribute, or set another mesh.tp",
                )


def _check_flow(model: PreTrainedModel, rules: TensorRules, plan: ParallelPlan) -> Problems:
    """Yield what the layers would compute wrongly, or not at all, on one process of `tp`.

    Args:
        model: on the meta device, unfused.
        rules: that the modules of the model can follow, with heads and widths that tp divides.
        plan: with its mesh resolved.
    """
    flow = follow_heads(model, rules, plan.mesh.tp)
    if not flow.ran:
        # Only rules of the user can get here: rules are never derived from layers that do not run.
        return
    if flow.replaced:
        yield Problem(
            f"tensor.styles: the forward pass of {type(model).__name__} replaces "
            f"{as_pattern(next(iter(flow.replaced)))} by a new module, which would not draw dropout and compute for "
            "the part of one process",
            "choose a configuration with which its modules stay, or set mesh.tp = 1",
        )
    found = [*dict.fromkeys(_of_modules(flow, rules))] or [*_of_layers(flow, type(model).__name__)]
    yield from found
    if plan.tensor.sequence_parallel and not found and not flow.replaced:
        reason = why_not_split(model, rules, plan.mesh.tp)
        if reason is not None:
            yield Problem(f"tensor.sequence_parallel: not for a {model.config.model_type}: {reason}", "set it to false")


def _of_modules(flow: Flow, rules: TensorRules) -> Problems:
    cannot_be_cut = ((flow.misused, MISUSED), (flow.joint, JOINT), (flow.per_head, NOT_PER_HEAD))
    # A module that cannot be cut does not run, so what was found after it has no meaning.
    kinds = cannot_be_cut if any(names for names, _ in cannot_be_cut) else ((flow.partial, PARTIAL),)
    for names, (problem, advice) in (*kinds, (flow.counted_twice, TWICE), (flow.mixed, MIXED)):
        for name in names:
            if name != HIDDEN_STATES:
                style = rules.styles.get(name)
                rule = "" if style is None else f" is {style!r}, but it"
                has_no_rule = names is flow.partial and style is None and not may_have_rule(name)
                what = f"tensor.styles: {as_pattern(name)}{rule} {problem}"
                yield Problem(what, UNNAMED if has_no_rule else advice)


def _of_layers(flow: Flow, architecture: str) -> Problems:
    if HIDDEN_STATES in flow.partial:
        yield Problem(
            f"tensor.styles: inside the layers of {architecture} a full tensor is combined with the heads, or the "
            "width, of one process, so its gradient would be partial",
            "add the missing rule, or set mesh.tp = 1",
        )
    elif flow.failure is not None:
        yield Problem(
            f"tensor.styles: the layers of {architecture} do not run with the heads of one process ({flow.failure})",
            "write other rules, or set mesh.tp = 1",
        )


def read_attribute(module: nn.Module, name: str) -> object:
    """Return the value of an attribute, such as `config.num_attention_heads`, or None."""
    value: object = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _set_tp(possible: Sequence[int]) -> str:
    return f"set mesh.tp to {'one of ' if len(possible) > 1 else ''}{', '.join(map(str, possible))}"
