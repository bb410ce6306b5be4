"""Resolve the rules of a plan for one model, and check that they can be followed.

A rule gives a module its style, and the style decides how the module is cut over tp.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtrain.config.plan import Style, TensorPlan
from meshtrain.errors import PlanError, Problem
from meshtrain.models.patterns import as_pattern, match_modules, match_names
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.tensor.style_row import StyleKind
from meshtrain.parallel.tensor.styles import STYLES

Problems = Iterator[Problem]


@dataclass(frozen=True)
class TensorRules:
    """The plan's patterns, resolved to the modules of one model.

    Attributes:
        styles: module name -> style.
        sharded_dims: name of a sharded parameter -> the dimension that is sharded over tp.
        summed: names of full parameters whose gradients are summed by rules of their own.
        local_attributes: module name -> attributes that count only this process's part.
        local_inputs: module name -> inputs of which each process takes its heads.
        logits_are_sharded: whether the head returns only this process's part of the vocabulary.
    """

    styles: Mapping[str, Style] = field(default_factory=dict)
    sharded_dims: Mapping[str, int] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()
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
    styles = {name: style for name, style in matched.styles.items() if is_module(model, name)}
    of_parameters = {name: style for name, style in matched.styles.items() if name not in styles}
    end = model.get_output_embeddings()
    head = None if end is None else name_of(model, end)
    _raise_any(_bare_parameters(model, styles, of_parameters))
    _raise_any(_misplaced_head(head, styles))
    _raise_any(
        chain(
            _misplaced_styles(model, styles),
            _misplaced_parameter_styles(of_parameters, styles),
            _inconsistent_ties(model, matched.styles),
            _wrong_sums(model, styles, plan),
        )
    )
    return unchecked_rules(
        model,
        matched,
        logits_are_sharded=plan.loss_parallel and head is not None and STYLES[styles[head]].gives == "gathered",
    )


@dataclass(frozen=True)
class MatchedRules:
    """Module (or parameter) name -> rule, for each kind of rule; they need not cover the model."""

    styles: dict[str, Style]
    local_attributes: dict[str, list[str]]
    local_inputs: dict[str, list[str]]


def unchecked_rules(model: nn.Module, matched: MatchedRules, *, logits_are_sharded: bool = False) -> TensorRules:
    """Return rules by module name with the dimensions that they shard, without a check."""
    styles = {name: style for name, style in matched.styles.items() if is_module(model, name)}
    of_parameters = {name: style for name, style in matched.styles.items() if name not in styles}
    return TensorRules(
        styles,
        dict(_sharded_dims(model, styles, of_parameters)),
        frozenset(name for name, style in of_parameters.items() if STYLES[style].gradients == "partial"),
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
    return modules + [name for name, _ in model.named_parameters() if may_have_rule(name)]


def may_have_rule(parameter: str) -> bool:
    """Return whether a parameter may have a rule of its own."""
    return not parameter.endswith((".weight", ".bias"))


def is_module(model: nn.Module, name: str) -> bool:
    """Return whether a name that a rule matches is that of a module, and not of a parameter."""
    owner, _, kind = name.rpartition(".")
    return isinstance(getattr(model.get_submodule(owner), kind), nn.Module)


def _sharded_dims(
    model: nn.Module, styles: Mapping[str, Style], of_parameters: Mapping[str, Style]
) -> Iterator[tuple[str, int]]:
    for name, style in styles.items():
        for kind, parameter in model.get_submodule(name).named_parameters(recurse=False):
            dim = sharded_dims(style, model.get_submodule(name)).get(kind)
            if STYLES[style].has_parameter_rules and f"{name}.{kind}" in of_parameters:
                dim = _dim_of_parameter(of_parameters[f"{name}.{kind}"], parameter.dim())
            if dim is not None:
                yield f"{name}.{kind}", dim


def _dim_of_parameter(style: Style, num_dims: int) -> int | None:
    row = STYLES[style]
    if not row.is_for_parameters or row.shards is None:
        return None
    return max(0, num_dims - 2) if row.shards == "outputs" else num_dims - 1


def sharded_dims(style: Style, module: nn.Module) -> dict[str, int]:
    """Return the dimension that a style shards, by name of the module's own parameters."""
    transposed = isinstance(module, Conv1D)
    match STYLES[style].shards:
        case "outputs":
            return {"weight": 1 if transposed else 0, "bias": 0}
        case "inputs":
            return {"weight": 0 if transposed else 1}
        case "rows":
            return {"weight": 0}
        case "experts":
            return {kind: 0 for kind, _ in module.named_parameters(recurse=False)}
        case None:
            return {}


def _raise_any(problems: Problems) -> None:
    # Where problems name patterns, all layers report the same one, which is raised only once.
    if found := dict.fromkeys(problems):
        raise PlanError(found)


def _bare_parameters(model: nn.Module, styles: Mapping[str, Style], of_parameters: Mapping[str, Style]) -> Problems:
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        is_block = owner in styles and STYLES[styles[owner]].kind == "shared input"
        if owner not in styles or (is_block and not may_have_rule(name)):
            yield Problem(f"tensor.styles: no rule places the parameters of {as_pattern(owner)}", "add one")
        elif is_block and not is_for_part(of_parameters.get(name)):
            yield Problem(
                f"tensor.styles: {as_pattern(owner)} is {styles[owner]!r}, and no rule shards its {as_pattern(name)}, "
                "or sums its gradient",
                f"make that 'colwise' or 'replicated_with_grad_allreduce', or {as_pattern(owner)} 'whole_sequence'",
            )


def is_for_part(style: Style | None) -> bool:
    """Return whether the rule of a single parameter is for one that a process uses on its part."""
    row = None if style is None else STYLES[style]
    return row is not None and row.is_for_parameters and (row.shards is not None or row.gradients == "partial")


def _misplaced_head(head: str | None, styles: Mapping[str, Style]) -> Problems:
    if head is not None and not STYLES[styles[head]].is_for_head:
        possible = " or ".join(repr(name) for name, row in STYLES.items() if row.is_for_head)
        yield Problem(f"tensor.styles: the head {head} is {styles[head]!r}", f"make it {possible}")


def _misplaced_styles(model: PreTrainedModel, styles: Mapping[str, Style]) -> Problems:
    for name, style in styles.items():
        for reason, advice in STYLES[style].requires(model, name):
            yield Problem(f"tensor.styles: {as_pattern(name)} is {style!r}{reason}", advice)


def _misplaced_parameter_styles(of_parameters: Mapping[str, Style], styles: Mapping[str, Style]) -> Problems:
    owners = [name for name, row in STYLES.items() if row.has_parameter_rules]
    possible = [repr(name) for name, row in STYLES.items() if row.is_for_parameters]
    for name, style in of_parameters.items():
        what, owner = f"tensor.styles: {as_pattern(name)} is {style!r}", name.rpartition(".")[0]
        if styles.get(owner) not in owners:
            yield Problem(
                f"{what}, but a rule for a parameter needs its module to be one of {', '.join(owners)}",
                "give the module such a rule, or leave this one out",
            )
        elif not STYLES[style].is_for_parameters:
            yield Problem(what, f"make it {', '.join(possible[:-1])} or {possible[-1]}")


def blocks_of(name: str, styles: Mapping[str, Style], kind: StyleKind) -> Iterator[str]:
    """Yield the names of the blocks of a kind that contain a module, the innermost first."""
    while name := name.rpartition(".")[0]:
        if name in styles and STYLES[styles[name]].kind == kind:
            yield name


def _inconsistent_ties(model: PreTrainedModel, styles: Mapping[str, Style]) -> Problems:
    layers, in_layers = find_layers(model)[0], dict[str, Problem]()
    for ends in model.all_tied_weights_keys.items():
        if all(name.startswith(f"{layers}.") for name in ends):
            if (problem := _difference_in_layers(ends, styles)) is not None:
                # One pair of layers stands for all.
                in_layers[as_pattern(ends[0])] = problem
            continue
        head, embedding = (name.rpartition(".")[0] for name in ends)
        if (STYLES[styles[head]].gives == "gathered") != (STYLES[styles[embedding]].shards == "rows"):
            yield Problem(
                f"tensor.styles: {head} is {styles[head]!r} and {embedding} is {styles[embedding]!r}, but they are "
                "one weight",
                "make them 'colwise_gather_output' and 'embedding_rowwise', or both 'replicate'",
            )
    yield from in_layers.values()


def _difference_in_layers(ends: tuple[str, str], styles: Mapping[str, Style]) -> Problem | None:
    """Compare the styles of a parameter that two layers share, and of the modules around it."""
    one, other = ends
    while one and other:
        if styles.get(one) != styles.get(other):
            found = [f"{name} is {styles[name]!r}" if name in styles else f"{name} has none" for name in (one, other)]
            return Problem(
                f"tensor.styles: {' and '.join(found)}, but they share parameters", "give both the same style"
            )
        one, other = (name.rpartition(".")[0] for name in (one, other))
    return None


def _wrong_sums(model: PreTrainedModel, styles: Mapping[str, Style], plan: TensorPlan) -> Problems:
    """Yield each module with full parameters whose gradients would be partial, or summed twice.

    Its copies on the processes would drift apart, or train with other gradients.
    """
    layers = find_layers(model)[0]
    for name, style in styles.items():
        row, what = STYLES[style], f"tensor.styles: {as_pattern(name)} is {style!r}"
        blocks = chain(blocks_of(name, styles, "shared input"), blocks_of(name, styles, "experts"))
        block = next(blocks, None)
        is_split = plan.sequence_parallel and name.startswith(f"{layers}.")
        if block is not None and (row.sums_outputs or (row.kind == "replica" and row.gradients != "partial")):
            problem = "its gradient must be summed"
            if row.sums_outputs:
                problem = "the gradient of its outputs would be summed twice"
            yield Problem(
                f"{what}, but inside of {as_pattern(block)} ({styles[block]!r}) each process works for its shards "
                f"only, so {problem}",
                "make it 'replicated_with_grad_allreduce'",
            )
        elif is_split and row.needs_full_sequence and not any(blocks_of(name, styles, "full sequence")):
            alone = row.kind == "replica" and not any(True for _ in model.get_submodule(name).children())
            if row.kind == "parameters":
                advice = "make it 'whole_sequence'"
            else:
                advice = "make it 'sequence_parallel'" if alone else "set tensor.sequence_parallel = false"
            yield Problem(
                f"{what}, which needs the full sequence, but with tensor.sequence_parallel each process has a part of "
                "it",
                advice,
            )


def name_of(model: nn.Module, wanted: nn.Module) -> str:
    """Return the name of a module inside a model."""
    return next(name for name, module in model.named_modules() if module is wanted)
