"""Resolve the rules of a plan for one model, and check that they can be followed.

A rule gives a module its style, and the style decides how the module is cut over tp.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.transformers import can_leave_out_experts
from meshtrain.config.plan import Style, TensorPlan
from meshtrain.errors import PlanError, Problem
from meshtrain.models.patterns import as_pattern, match_modules, match_names
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.tensor.probes import looks_up_rows

Problems = Iterator[str | Problem]
PROJECTIONS = ("colwise", "colwise_gather_output", "colwise_blocks", "rowwise", "rowwise_split_input")
# Styles of a module whose own parameters may have rules.
OWNERS = ("local_params", "moe_tp_experts")
# Styles whose gradients are complete only on a process that sees the full sequence.
SEES_ALL = ("replicate", "mla_kv_a_proj", "moe_tp_experts", "expert_parallel", "colwise_gather_output", "local_params")


@dataclass(frozen=True)
class TensorRules:
    """The plan's patterns, resolved to the modules of one model.

    Attributes:
        styles: module name -> style.
        sharded_dims: name of a sharded parameter -> the dimension that is sharded over tp.
        local_attributes: module name -> attributes that count only this process's part.
        local_inputs: module name -> inputs of which each process takes its heads.
        logits_are_sharded: whether the head returns only this process's part of the vocabulary.
    """

    styles: Mapping[str, Style] = field(default_factory=dict)
    sharded_dims: Mapping[str, int] = field(default_factory=dict)
    local_attributes: Mapping[str, list[str]] = field(default_factory=dict)
    local_inputs: Mapping[str, list[str]] = field(default_factory=dict)
    logits_are_sharded: bool = False


def resolve_rules(model: PreTrainedModel, plan: TensorPlan) -> TensorRules:
    """Match every rule of the plan against the complete (unfused) model.

    Raises:
        PlanError: for a rule that matches nothing, two rules on one module, a parameter without a
            rule, or a rule that its module cannot follow.
    """
    matched = match_rules(model, plan)
    styles = {name: style for name, style in matched.styles.items() if _is_module(model, name)}
    of_parameters = {name: style for name, style in matched.styles.items() if name not in styles}
    end = model.get_output_embeddings()
    head = None if end is None else name_of(model, end)
    _raise_any(_bare_parameters(model, styles))
    if head is not None and styles[head] not in ("colwise_gather_output", "replicate"):
        raise PlanError(
            f"tensor.styles: the head {head} is {styles[head]!r}; it can be 'colwise_gather_output' or 'replicate'"
        )
    _raise_any(
        chain(
            _misplaced_styles(model, styles),
            _misplaced_parameter_styles(of_parameters, styles),
            _inconsistent_ties(model, styles),
            _unsummed_replicas(model, styles, plan),
        )
    )
    return unchecked_rules(
        model,
        matched,
        logits_are_sharded=plan.loss_parallel and head is not None and styles[head] == "colwise_gather_output",
    )


@dataclass(frozen=True)
class MatchedRules:
    """Module (or parameter) name -> rule, for each kind of rule; they need not cover the model."""

    styles: dict[str, Style]
    local_attributes: dict[str, list[str]]
    local_inputs: dict[str, list[str]]


def unchecked_rules(model: nn.Module, matched: MatchedRules, *, logits_are_sharded: bool = False) -> TensorRules:
    """Return rules by module name with the dimensions that they shard, without a check."""
    styles = {name: style for name, style in matched.styles.items() if _is_module(model, name)}
    of_parameters = {name: style for name, style in matched.styles.items() if name not in styles}
    return TensorRules(
        styles,
        dict(_sharded_dims(model, styles, of_parameters)),
        matched.local_attributes,
        matched.local_inputs,
        logits_are_sharded,
    )


def match_rules(model: nn.Module, plan: TensorPlan) -> MatchedRules:
    """Match the patterns of a plan.

    Raises:
        PlanError: for a rule that matches nothing, or two rules on one module.
    """
    return MatchedRules(
        match_names(rule_names(model), plan.styles, "tensor.styles"),
        match_modules(model, plan.local_attributes, "tensor.local_attributes"),
        match_modules(model, plan.local_inputs, "tensor.local_inputs"),
    )


def rule_names(model: nn.Module) -> list[str]:
    """Return the names that a style can match.

    These are all modules, and the parameters that are not called `weight` or `bias`.
    """
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters() if not name.endswith((".weight", ".bias"))]
    return modules + parameters


def _is_module(model: nn.Module, name: str) -> bool:
    owner, _, kind = name.rpartition(".")
    return isinstance(getattr(model.get_submodule(owner), kind), nn.Module)


def _sharded_dims(
    model: nn.Module, styles: Mapping[str, Style], of_parameters: Mapping[str, Style]
) -> Iterator[tuple[str, int]]:
    for name, style in styles.items():
        for kind, parameter in model.get_submodule(name).named_parameters(recurse=False):
            dim = sharded_dims(style, model.get_submodule(name)).get(kind)
            if style in OWNERS and f"{name}.{kind}" in of_parameters:
                dim = _dim_of_parameter(of_parameters[f"{name}.{kind}"], parameter.dim())
            if style == "expert_parallel":
                dim = 0
            if dim is not None:
                yield f"{name}.{kind}", dim


def _dim_of_parameter(style: Style, num_dims: int) -> int | None:
    if style == "colwise":
        return max(0, num_dims - 2)
    return num_dims - 1 if style == "rowwise" else None


def sharded_dims(style: Style | None, module: nn.Module) -> dict[str, int]:
    """Return the dimension that a style shards, by parameter of a projection or embedding."""
    transposed = isinstance(module, Conv1D)
    if style in ("colwise", "colwise_gather_output", "colwise_blocks"):
        return {"weight": 1 if transposed else 0, "bias": 0}
    if style in ("rowwise", "rowwise_split_input"):
        return {"weight": 0 if transposed else 1}
    return {"weight": 0} if style == "embedding_rowwise" else {}


def _raise_any(problems: Problems) -> None:
    # Problems name patterns, so all layers report the same one, which is raised only once.
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
        if style in PROJECTIONS and not is_projection(module):
            yield f"{what}, which is for Linear and Conv1D, not for a {kind}"
        if style == "embedding_rowwise" and not is_lookup(module):
            yield f"{what}, which is for an Embedding, not for a {kind}"
        if style == "mla_kv_a_proj" and mla_rope_width(getattr(model, "config", None)) is None:
            yield f"{what}, but the model's configuration has no qk_rope_head_dim"
        if style == "replicated_heads" and attention_of(model, name) is None:
            yield f"{what}, but no module around it has num_key_value_groups to say which heads share one"
        if style == "expert_parallel" and not can_leave_out_experts(module):
            yield f"{what}, but a {kind} cannot leave out the experts of other processes; use 'moe_tp_experts'"
        if style == "embedding_rowwise" and (
            getattr(module, "max_norm", None) is not None or getattr(module, "scale_grad_by_freq", False)
        ):
            yield f"{what}, which knows neither max_norm nor scale_grad_by_freq"


def _misplaced_parameter_styles(of_parameters: Mapping[str, Style], styles: Mapping[str, Style]) -> Problems:
    for name, style in of_parameters.items():
        what, owner = f"tensor.styles: {as_pattern(name)} is {style!r}", name.rpartition(".")[0]
        if styles.get(owner) not in OWNERS:
            yield f"{what}, but a rule for a parameter needs its module to be one of {', '.join(OWNERS)}"
        elif style not in ("colwise", "rowwise", "replicate"):
            yield f"{what}; a parameter can be 'colwise', 'rowwise' or 'replicate'"


def is_projection(module: nn.Module) -> bool:
    """Return whether a module computes what Linear or Conv1D does.

    The sharded class replaces its forward.
    """
    # Most subclasses have a forward of their own, so they do not count. Falcon's only writes the
    # same product in another form.
    return type(module) in (nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"


def is_lookup(module: nn.Module) -> bool:
    """Return whether a module looks up rows as Embedding does.

    It may change the rows afterwards (Gemma scales them).
    """
    return isinstance(module, nn.Embedding) and looks_up_rows(module)


def mla_rope_width(config: PretrainedConfig | None) -> int | None:
    """Return the number of outputs of latent attention's key projection that all heads share."""
    return getattr(config, "qk_rope_head_dim", None)


def local_count(attribute: str, count: object, tp: int) -> int | None:
    """Return this process's part of a count.

    It is 1 for key-value heads that processes share, and None if `tp` cannot divide the count.
    """
    if not isinstance(count, int) or count < 0:
        return None
    if count % tp == 0:
        return count // tp
    shared = "key_value_heads" in attribute or "kv_heads" in attribute
    return 1 if shared and count and tp % count == 0 else None


def gives_heads(pattern: str) -> bool:
    """Return whether a rule is for a projection to key-value heads, by the names used in models."""
    return pattern.rpartition(".")[2] in ("k_proj", "v_proj", "k", "v")


def attention_of(model: nn.Module, name: str) -> str | None:
    """Return the name of the module around a key-value projection that has `num_key_value_groups`.

    That is the number of query heads that share a key-value head. None if there is no such module.
    """
    while name := name.rpartition(".")[0]:
        if isinstance(getattr(model.get_submodule(name), "num_key_value_groups", None), int):
            return name
    return None


def blocks_of(name: str, styles: Mapping[str, Style], style: Style) -> Iterator[str]:
    """Yield the names of the modules of a style that contain a module, the innermost first."""
    while name := name.rpartition(".")[0]:
        if styles.get(name) == style:
            yield name


def _inconsistent_ties(model: PreTrainedModel, styles: Mapping[str, Style]) -> Problems:
    for ends in model.all_tied_weights_keys.items():
        head, embedding = (name.rpartition(".")[0] for name in ends)
        if (styles[head] == "colwise_gather_output") != (styles[embedding] == "embedding_rowwise"):
            yield (
                f"tensor.styles: {head} is {styles[head]!r} and {embedding} is {styles[embedding]!r}, but they are one "
                "weight; make them 'colwise_gather_output' and 'embedding_rowwise', or both 'replicate'"
            )


def _unsummed_replicas(model: PreTrainedModel, styles: Mapping[str, Style], plan: TensorPlan) -> Problems:
    """Yield each replicated module whose gradients would be partial and not summed.

    Its copies on the processes would drift apart.
    """
    layers = find_layers(model)[0]
    for name, style in styles.items():
        what = f"tensor.styles: {as_pattern(name)} is {style!r}"
        block = next(blocks_of(name, styles, "shared_input"), None)
        whole = next(blocks_of(name, styles, "whole_sequence"), None)
        if block is not None and style in ("replicate", "sequence_parallel"):
            yield (
                f"{what}, but inside of {as_pattern(block)} ('shared_input') each process works for its shards only, "
                "so its gradient must be summed; make it 'replicated_with_grad_allreduce'"
            )
        elif plan.sequence_parallel and style in SEES_ALL and name.startswith(f"{layers}.") and whole is None:
            alone = style == "replicate" and not any(True for _ in model.get_submodule(name).children())
            advice = "make it 'sequence_parallel'" if alone else "set tensor.sequence_parallel = false"
            yield (
                f"{what}, but with tensor.sequence_parallel each process sees a part of the sequence, so its gradient "
                f"must be summed; {advice}"
            )


def name_of(model: nn.Module, wanted: nn.Module) -> str:
    """Return the name of a module inside a model."""
    return next(name for name, module in model.named_modules() if module is wanted)
