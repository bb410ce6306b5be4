"""Where each module of a model may be cut over tp: the rules of a plan, resolved and checked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtrain.config.plan import Style, TensorPlan
from meshtrain.errors import PlanError
from meshtrain.models.patterns import as_pattern, match_modules
from meshtrain.parallel.anatomy import find_layers

Problems = Iterator[str]


@dataclass(frozen=True)
class TensorRules:
    """The plan's patterns, resolved to the modules of one model.

    Attributes:
        styles: module name -> style.
        local_attributes: module name -> attributes that count only this process's part.
        logits_are_sharded: whether the head gives each process its part of the vocabulary only.
    """

    styles: Mapping[str, Style] = field(default_factory=dict)
    local_attributes: Mapping[str, list[str]] = field(default_factory=dict)
    logits_are_sharded: bool = False


def resolve_rules(model: PreTrainedModel, plan: TensorPlan) -> TensorRules:
    """Match every rule of the plan against the whole (unfused) model.

    Raises:
        PlanError: for a rule that matches nothing, two rules on one module, a parameter without a rule, or a rule that
            its module cannot follow.
    """
    styles, local_attributes = match_rules(model, plan)
    head = name_of(model, model.get_output_embeddings())
    _raise_any(_bare_parameters(model, styles))
    if styles[head] not in ("colwise_gather_output", "replicate"):
        raise PlanError(
            f"tensor.styles: the head {head} is {styles[head]!r}; it can be 'colwise_gather_output' or 'replicate'"
        )
    _raise_any(
        chain(_misplaced_styles(model, styles), _torn_ties(model, styles), _drifting_replicas(model, styles, plan))
    )
    return TensorRules(
        styles,
        local_attributes,
        logits_are_sharded=plan.loss_parallel and styles[head] == "colwise_gather_output",
    )


def match_rules(model: nn.Module, plan: TensorPlan) -> tuple[dict[str, Style], dict[str, list[str]]]:
    """Return module name -> style, and module name -> local attributes; they need not cover the model.

    Raises:
        PlanError: for a rule that matches nothing, or two rules on one module.
    """
    return (
        match_modules(model, plan.styles, "tensor.styles"),
        match_modules(model, plan.local_attributes, "tensor.local_attributes"),
    )


def sharded_dims(style: Style | None, module: nn.Module) -> dict[str, int]:
    """Return parameter of the module -> the dimension that the style shards."""
    transposed = isinstance(module, Conv1D)
    if style in ("colwise", "colwise_gather_output"):
        return {"weight": 1 if transposed else 0, "bias": 0}
    if style == "rowwise":
        return {"weight": 0 if transposed else 1}
    return {"weight": 0} if style == "embedding_rowwise" else {}


def _raise_any(problems: Problems) -> None:
    # Once and not for every layer: the problems name patterns.
    if found := dict.fromkeys(problems):
        raise PlanError(found)


def _bare_parameters(model: nn.Module, styles: Mapping[str, Style]) -> Problems:
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        if styles.get(owner, "shared_input") == "shared_input":
            yield f"tensor.styles: no rule places the parameters of {as_pattern(owner)}; add one"


def _misplaced_styles(model: nn.Module, styles: Mapping[str, Style]) -> Problems:
    for name, style in styles.items():
        module = model.get_submodule(name)
        what, kind = f"tensor.styles: {as_pattern(name)} is {style!r}", type(module).__name__
        # Not a subclass: it has a forward of its own, which the sharded class would silently replace.
        if style in ("colwise", "colwise_gather_output", "rowwise") and type(module) not in (nn.Linear, Conv1D):
            yield f"{what}, which is for Linear and Conv1D, not for a {kind}"
        if style == "embedding_rowwise" and type(module) is not nn.Embedding:
            yield f"{what}, which is for an Embedding, not for a {kind}"
        if style == "embedding_rowwise" and (
            getattr(module, "max_norm", None) is not None or getattr(module, "scale_grad_by_freq", False)
        ):
            yield f"{what}, which knows neither max_norm nor scale_grad_by_freq"


def _torn_ties(model: PreTrainedModel, styles: Mapping[str, Style]) -> Problems:
    for ends in model.all_tied_weights_keys.items():
        head, embedding = (name.rpartition(".")[0] for name in ends)
        if (styles[head] == "colwise_gather_output") != (styles[embedding] == "embedding_rowwise"):
            yield (
                f"tensor.styles: {head} is {styles[head]!r} and {embedding} is {styles[embedding]!r}, but they are one "
                "weight; make them 'colwise_gather_output' and 'embedding_rowwise', or both 'replicate'"
            )


def _drifting_replicas(model: PreTrainedModel, styles: Mapping[str, Style], plan: TensorPlan) -> Problems:
    """Find replicated parameters whose gradients would be partial and not be summed: they would drift apart."""
    layers = find_layers(model)[0]
    shared = [name for name, style in styles.items() if style == "shared_input"]
    for name, style in styles.items():
        what = f"tensor.styles: {as_pattern(name)} is {style!r}"
        block = next((block for block in shared if name.startswith(f"{block}.")), None)
        if block is not None and style in ("replicate", "sequence_parallel"):
            yield (
                f"{what}, but inside of {as_pattern(block)} ('shared_input') each process works for its shards only, "
                "so its gradient must be summed; make it 'replicated_with_grad_allreduce'"
            )
        elif plan.sequence_parallel and style == "replicate" and name.startswith(f"{layers}."):
            yield (
                f"{what}, but with tensor.sequence_parallel each process sees a part of the sequence, so its gradient "
                "must be summed; make it 'sequence_parallel'"
            )


def name_of(model: nn.Module, wanted: nn.Module) -> str:
    """Return the name of a module inside a model."""
    return next(name for name, module in model.named_modules() if module is wanted)
