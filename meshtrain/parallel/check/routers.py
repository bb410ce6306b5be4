"""Check that a model and its plan have what the losses and biases of routers need."""

import copy
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan, Style
from meshtrain.config.run import RouterConfig
from meshtrain.errors import ConfigError, ModelError, Problem
from meshtrain.models.dtypes import dtype_name
from meshtrain.models.fused import unfuse
from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.experts.stacks import expert_stacks, numbers_of_experts, selection_biases
from meshtrain.parallel.experts.use import countable_stacks, counts_tokens
from meshtrain.parallel.routers.formulas import RouterFormulas, find_formulas, find_routers
from meshtrain.parallel.routers.trial import returns_logits
from meshtrain.parallel.tensor.rules import Problems, resolve_rules
from meshtrain.parallel.tensor.styles import STYLES

# Number formats in which a small step of a bias is lost.
SHORT = ("bfloat16", "float16")


def check_routers(plan: ParallelPlan, model: PreTrainedModel, router: RouterConfig) -> Problems:
    """Yield why a model or its plan does not fit the losses and biases that are asked for.

    Args:
        plan: with rules of tensor parallelism that fit the model.
        model: the stock model on the meta device; it is not changed.
        router: of the run.
    """
    formulas: RouterFormulas | None = None
    try:
        formulas = find_formulas(model, router)
    except ModelError as error:
        yield from error.problems
    if not (formulas or router.bias_update_rate):
        return
    styles = _styles(plan, model) if plan.mesh.tp > 1 else {}
    if formulas is not None:
        yield from _check_styles(styles, model, formulas)
        if router.z_loss:
            yield from _check_logits(model)
    if router.bias_update_rate:
        yield from _check_biases(router, styles, model, plan.precision.activations)
    if plan.compile.enabled and plan.recompute.mode == "selective":
        yield Problem(
            "recompute.mode = 'selective' with compile.enabled and losses or biases of routers: attention and MLP are "
            "then compiled separately, and torch cannot select the results to keep inside them",
            "set recompute.mode = 'full', or compile.enabled = false",
        )


def check_expert_tokens(plan: ParallelPlan, model: PreTrainedModel, router: RouterConfig) -> None:
    """Check that the tokens of each expert are counted, because they shall be metrics.

    Args:
        plan: resolved.
        model: the stock model on the meta device; it is not changed.
        router: of the run.

    Raises:
        ConfigError: if they are not.
    """
    asked = "logging.expert_tokens asks for the tokens of each expert"
    stacks = expert_stacks(model).keys()
    if not stacks or numbers_of_experts(model).keys() != stacks:
        what = "which does not say how many experts each stack has" if stacks else "which has no stacked experts"
        raise ConfigError(f"{asked}, but the model is a {type(model).__name__}, {what}", "leave it out")
    if not counts_tokens(plan, router):
        raise ConfigError(
            f"{asked}, but with compile.enabled they are counted only for router.bias_update_rate, because the counts "
            "break the graphs of layers",
            "leave logging.expert_tokens out, or set compile.enabled = false",
        )
    styles = _styles(plan, model) if plan.mesh.tp > 1 else {}
    countable = countable_stacks(model, styles)
    name = next((it for it in numbers_of_experts(model) if it not in countable), None)
    if name is not None:
        raise ConfigError(
            f"tensor.styles: {as_pattern(name)} is {styles[name]!r}, but {asked}, and every process needs the choices "
            "of whole microbatches for them",
            "make it 'moe_tp_experts', or leave logging.expert_tokens out",
        )


def check_fillers(model: PreTrainedModel, router: RouterConfig) -> None:
    """Check that routers do not learn from the rows of padding that fill the last batch.

    A row has at least one token that no mask leaves out.

    Args:
        model: the stock model.
        router: of the run.

    Raises:
        ConfigError: if they would.
    """
    if router.bias_update_rate or find_formulas(model, router) is not None:
        raise ConfigError(
            "data.drop_last = false fills the last batch of an epoch with rows of padding, and the losses and biases "
            "of routers would count their tokens",
            "leave it out",
        )


def _styles(plan: ParallelPlan, model: PreTrainedModel) -> Mapping[str, Style]:
    """Return FQN -> style of tensor parallelism."""
    unfused = copy.deepcopy(model)
    unfuse(unfused, plan.tensor.fused)
    return resolve_rules(unfused, plan.tensor).styles


def _check_logits(model: PreTrainedModel) -> Problems:
    try:
        if returns_logits(model):
            return
    except ModelError as error:
        yield from error.problems
        return
    yield Problem(
        f"router.z_loss asks for a loss of the logits of routers, but what those of {type(model).__name__} return are "
        "not logits, one row per token",
        "leave it out",
    )


def _check_styles(styles: Mapping[str, Style], model: PreTrainedModel, formulas: RouterFormulas) -> Problems:
    seen = set()
    for name, module in find_routers(model, formulas.recorder) if styles else ():
        for parameter, _ in module.named_parameters(prefix=name):
            owner = parameter.rpartition(".")[0]
            row = STYLES[styles[owner]]
            is_same = row.kind == "replica" and row.gradients == "full"
            if not is_same and as_pattern(owner) not in seen:
                seen.add(as_pattern(owner))
                yield Problem(
                    f"tensor.styles: {as_pattern(owner)} is {styles[owner]!r}, but {formulas.asked_by}, and every "
                    "process needs the logits of whole microbatches for them",
                    f"make it 'replicate', or {formulas.otherwise}",
                )


def _check_biases(
    router: RouterConfig, styles: Mapping[str, Style], model: PreTrainedModel, activations: str
) -> Problems:
    asked = f"router.bias_update_rate = {router.bias_update_rate}"
    found, numbers, countable = selection_biases(model), numbers_of_experts(model), countable_stacks(model, styles)
    if not found:
        has_experts = bool(expert_stacks(model))
        what = "whose routers have no bias to select experts with" if has_experts else "which has no stacked experts"
        yield Problem(f"{asked}, but the model is a {type(model).__name__}, {what}", "leave it out")
    for name, bias in found.items():
        size, dtype, number = getattr(*bias).numel(), getattr(*bias).dtype, numbers.get(name)
        if name in numbers and name not in countable:
            yield Problem(
                f"tensor.styles: {as_pattern(name)} is {styles[name]!r}, but for {asked} every process needs the "
                "choices of whole microbatches",
                "make it 'moe_tp_experts', or leave that out",
            )
            return
        if dtype.itemsize < torch.float32.itemsize:
            yield Problem(
                f"{asked}, but the biases of {type(model).__name__} are in {dtype_name(dtype)} here, which would lose "
                "such steps",
                'set precision.parameters = "float32"',
            )
            return
        if isinstance(getattr(*bias), nn.Parameter) and activations in SHORT:
            yield Problem(
                f"{asked}, but the biases of {type(model).__name__} are parameters, which routers get in {activations} "
                "here, and which would lose such steps",
                'set precision.compute = "float32"',
            )
            return
        if number != size:
            experts = "experts, whose number is not known" if number is None else f"{number} experts"
            yield Problem(f"{asked}, but {name} has {size} biases for {experts}", "leave it out")
            return
