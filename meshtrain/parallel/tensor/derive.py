"""Derive tensor rules for a model from its own plan, or from a family plan, and complete them.

transformers has a plan for most models (`_tp_plan`), which names the projections that may be cut
and leaves out the rest. Its style names are the same as ours, apart from those that pack several
projections into one, which we unfuse. Modules that the plan leaves out stay full on every process.
Blocks that work on the parts of one process alone share the collective of their input.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

from torch import nn
from transformers import PreTrainedModel

from meshtrain import console
from meshtrain.compat.transformers import tensor_plan
from meshtrain.config.families import find_family
from meshtrain.config.plan import ParallelPlan, Style, TensorPlan
from meshtrain.errors import PlanError, UserError
from meshtrain.models.fused import UnfusedProjection, unfuse
from meshtrain.models.patterns import as_pattern, compile_pattern, match_modules
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.tensor.dataflow.checks import where_rules_fail
from meshtrain.parallel.tensor.dataflow.parts import WAYS
from meshtrain.parallel.tensor.flow import follow_heads
from meshtrain.parallel.tensor.input_blocks import LOCAL, SUMMED, alone_on_parts, blocks_inside
from meshtrain.parallel.tensor.memory import remembered
from meshtrain.parallel.tensor.origins import HIDDEN_STATES, Flow
from meshtrain.parallel.tensor.requirements import is_lookup
from meshtrain.parallel.tensor.rules import (
    MatchedRules,
    TensorRules,
    blocks_of,
    is_module,
    match_rules,
    name_of,
    rule_names,
    unchecked_rules,
)
from meshtrain.parallel.tensor.shared_heads import HeadLabels, labels_once, styles_of_shared_heads, with_shared_heads
from meshtrain.parallel.tensor.sources import FROM_TRANSFORMERS, RuleTables, from_values, own_rules, without_gathering
from meshtrain.parallel.tensor.styles import STYLES

# Names of transformers for projections and experts that hold several parts.
PACKED = ("packed_colwise", "packed_rowwise")
PER_HEAD: Style = "per_head"


def with_derived_rules(plan: ParallelPlan, model: PreTrainedModel) -> ParallelPlan:
    """Return the plan with rules for every module of the model, where the plan left them open.

    Args:
        plan: with its mesh resolved.
        model: the stock model on the meta device; it is not changed.

    Returns:
        The plan with its own rules if it has any; for a model without a language modeling head, the
        rules of the head are replaced. Without tensor parallelism, derived rules only name what is
        fused, so that the parameters of a model are the same on every mesh.

    Raises:
        PlanError: if there is nothing to derive rules from.
    """
    if plan.tensor.styles and not plan.tensor.auto:
        plan = plan if model.get_output_embeddings() is not None else _with_another_head(plan, model)
        return with_shared_heads(plan, model)
    source = own_rules(plan.tensor) if plan.tensor.auto else _find_source(model, plan)
    names = rule_names(model)
    fused = {pattern: parts for pattern, parts in source.fused.items() if _matches(pattern, names)}
    rules: dict[str, object] = {"fused": fused, "auto": False, "styles": {}}
    if plan.mesh.tp > 1:
        unfused = copy.deepcopy(model)
        unfuse(unfused, fused)
        module_names = [name for name, _ in unfused.named_modules() if name]
        for kind in ("local_attributes", "local_inputs"):
            rules[kind] = {p: rule for p, rule in getattr(source, kind).items() if _matches(p, module_names)}
        others = plan.tensor.model_copy(update=rules)
        styles = _complete(unfused, source.styles, others, plan.mesh.tp, labels_once(model))
        rules["styles"] = _as_patterns(unfused, styles)
    return plan.model_copy(update={"tensor": plan.tensor.model_copy(update=rules)})


def _with_another_head(plan: ParallelPlan, model: PreTrainedModel) -> ParallelPlan:
    """Return the plan without rules for the head of a causal LM; the model's head stays full."""
    base = f"{model.base_model_prefix}."
    names = rule_names(model)
    styles = {p: style for p, style in plan.tensor.styles.items() if p.startswith(base) or _matches(p, names)}
    for name, module in model.named_modules():
        has_rule = any(compile_pattern(pattern).fullmatch(name) for pattern in styles)
        if name and not name.startswith(base) and not has_rule and any(True for _ in module.parameters(recurse=False)):
            styles[name] = "replicate"
    return plan.model_copy(update={"tensor": plan.tensor.model_copy(update={"styles": styles})})


def _find_source(model: PreTrainedModel, plan: ParallelPlan) -> RuleTables:
    tp = plan.mesh.tp
    family = find_family(model.config.model_type)
    if family is not None:
        return own_rules(family.tensor)
    words = {pattern: word for pattern, word in tensor_plan(model).items() if _matches(pattern, rule_names(model))}
    ends = {name_of(model, end) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end}
    if not words.keys() - ends:
        return from_values(model, tp)
    words = {pattern: word for pattern, word in words.items() if pattern not in ends}
    if (better := without_gathering(words, model)) is not None:
        return better
    if (problem := _problem_of(words, model, plan)) is None:
        return _translate(words, plan.tensor.experts)
    _say(f"The tensor parallel plan of transformers for a {model.config.model_type} is not used: {problem}")
    return from_values(model, tp)


@cache
def _say(line: str) -> None:
    """Print a line once in this process."""
    console.line(line)


def _problem_of(words: Mapping[str, str], model: PreTrainedModel, plan: ParallelPlan) -> str | None:
    """Return why a plan of transformers cannot be used, None if it can.

    Args:
        words: pattern -> name of a style in transformers.
        model: stock, on the meta device.
        plan: with its mesh resolved.
    """
    for pattern, word in words.items():
        if word not in (*FROM_TRANSFORMERS, *PACKED):
            return f"its {word!r} for {pattern} has no meaning here"
    source, labels = _translate(words, "tensor"), labels_once(model)

    def rules_of(tiny: PreTrainedModel) -> TensorRules:
        known = plan.tensor.model_copy(update={"experts": "tensor"})
        styles = _complete(tiny, source.styles, known, WAYS, labels)
        return unchecked_rules(tiny, match_rules(tiny, known.model_copy(update={"styles": styles})))

    names = rule_names(model)
    fused = {pattern: parts for pattern, parts in source.fused.items() if _matches(pattern, names)}
    try:
        details = [dict(words), plan.mesh.tp, plan.tensor.model_dump(mode="json")]
        module = remembered(
            "plan of transformers",
            model,
            details,
            lambda: where_rules_fail(model, plan.mesh.tp, fused, rules_of),
        )
    except UserError:
        # There is no tiny copy, or its layers do not run without values. So nothing shows that the
        # plan is wrong, and over tp the proof before a run, or `_complete`, refuses the model.
        return None
    return None if module is None else f"two processes would not compute {module} as one does"


def _translate(words: Mapping[str, str], experts: str) -> RuleTables:
    """Return our rules for a plan of transformers: pattern -> style name."""
    source = RuleTables()
    # The last dimension of these experts holds their parts and is not cut, so they stay full.
    last = {pattern for pattern, word in words.items() if word == "packed_rowwise"}
    full = {pattern.rpartition(".")[0] for pattern in last} if experts == "tensor" else set()
    for pattern, word in words.items():
        owner, _, kind = pattern.rpartition(".")
        if pattern in last or full & {pattern, owner}:
            continue
        if word == "packed_colwise":
            parts = ["gate", "up"] if kind == "gate_up_proj" else ["first", "second"]
            source.fused[pattern] = [*parts]
            # Stacked experts stay one parameter; a projection becomes one projection for each part.
            source.styles |= dict.fromkeys((pattern, *(f"{pattern}.{part}" for part in parts)), "colwise")
        else:
            source.styles[pattern] = FROM_TRANSFORMERS[word]
    return source


def _matches(pattern: str, names: list[str]) -> bool:
    regex = compile_pattern(pattern)
    return any(regex.fullmatch(name) for name in names)


def _complete(
    model: PreTrainedModel, known: Mapping[str, Style], plan: TensorPlan, tp: int, labels: Callable[[], HeadLabels]
) -> dict[str, Style]:
    """Return the styles of modules with parameters of their own, and of blocks that share an input.

    Args:
        model: unfused, on the meta device.
        known: pattern -> style, of the source.
        plan: with the other rules and settings.
        tp: number of processes that share a layer.
        labels: returns what the projections of attention give and take.
    """
    styles = styles_of_shared_heads(_match_known(model, known, plan), plan.fused, model, tp, labels)
    layers_name, layers = find_layers(model)
    prefix = f"{layers_name}."
    styles |= _ends(model)
    for name, module in model.named_modules():
        if name and name not in styles and any(True for _ in module.parameters(recurse=False)):
            in_experts = any(blocks_of(name, styles, "experts"))
            styles[name] = SUMMED if in_experts else "replicate"
    styles |= _on_heads(model, styles, plan, tp)
    for index, layer in enumerate(layers):
        for child, module in layer.named_children():
            styles |= dict(blocks_inside(f"{prefix}{index}.{child}", module, styles))
    styles |= dict.fromkeys(alone_on_parts(model, styles), "shared_outputs")
    styles = _corrected(model, styles, plan, tp)
    styles |= dict.fromkeys(alone_on_parts(model, styles), "shared_outputs")
    order = [name for name in rule_names(model) if name in styles]
    return {name: styles[name] for name in order}


def _on_heads(model: PreTrainedModel, styles: Mapping[str, Style], plan: TensorPlan, tp: int) -> dict[str, Style]:
    """Return the styles of modules with full parameters that see a part of the heads or the width.

    A block around projections may have parameters of its own that do, such as a temperature. They
    get rules.

    Raises:
        PlanError: if the layers do not run on the meta device, which is the only way to find these
            modules.
    """
    flow = _follow(model, styles, plan, tp)
    if not flow.ran:
        raise PlanError(
            f"tensor.styles: mesh.tp = {tp}, but the layers of {type(model).__name__} do not run without values "
            f"({flow.failure}), so nothing tells which parameters see all heads",
            "write the rules, or set mesh.tp = 1",
        )
    names = rule_names(model)
    found: dict[str, Style] = {}
    for style, owners in ((SUMMED, flow.on_parts), (PER_HEAD, flow.per_head)):
        # The pass runs only one layer of each kind; patterns find the same modules in the others.
        for regex in {compile_pattern(as_pattern(owner)) for owner in owners}:
            found |= dict.fromkeys((name for name in names if regex.fullmatch(name)), style)
    for regex in {compile_pattern(as_pattern(it)) for it in flow.partial if it and not is_module(model, it)}:
        summed = [name for name in names if regex.fullmatch(name)]
        blocks = {name.rpartition(".")[0] for name in summed}
        found |= dict.fromkeys(summed, SUMMED)
        found |= {it: LOCAL for it in blocks if not STYLES[styles[it]].has_parameter_rules}
    of_heads = tuple(f"{name}." for name, style in {**styles, **found}.items() if style == PER_HEAD)
    return found | {name: SUMMED for name in styles if name.startswith(of_heads)}


def _follow(model: PreTrainedModel, styles: Mapping[str, Style], plan: TensorPlan, tp: int) -> Flow:
    rules = MatchedRules(
        dict(styles),
        match_modules(model, plan.local_attributes, "tensor.local_attributes"),
        match_modules(model, plan.local_inputs, "tensor.local_inputs"),
    )
    return follow_heads(model, unchecked_rules(model, rules), tp)


def _corrected(model: PreTrainedModel, styles: Mapping[str, Style], plan: TensorPlan, tp: int) -> dict[str, Style]:
    """Return the styles with what shows only when the blocks that share an input are known.

    A module is summed if its results meet the heads of one process, as those of the norm of a key
    that all heads share.
    """
    flow = _follow(model, styles, plan, tp)
    blocks = [name for name, style in styles.items() if style == "shared_input"]
    # The layers may run without blocks, which get their input by position or as `hidden_states`.
    unentered = list(flow.unentered) if flow.failure is None else blocks
    # A part that a block returns is for a projection outside (BERT), or is used as if it were full.
    leaking = list(flow.leaking) if HIDDEN_STATES in flow.partial else []
    if unentered or leaking:
        styles = _without_blocks(model, styles, unentered, leaking)
        styles |= dict.fromkeys(alone_on_parts(model, styles), "shared_outputs")
        flow = _follow(model, styles, plan, tp)
    partial, layers = {as_pattern(name) for name in flow.partial}, find_layers(model)[0]
    full = [it for it, style in styles.items() if style in ("replicate", "sequence_parallel")]
    summed = [it for it in full if it.startswith(f"{layers}.") and as_pattern(it) in partial]
    return {**styles, **dict.fromkeys(summed, SUMMED)}


def _without_blocks(
    model: nn.Module, styles: Mapping[str, Style], unentered: Iterable[str], leaking: Iterable[str]
) -> dict[str, Style]:
    """Return the styles without the blocks that do not share an input.

    Args:
        unentered: those with a projection of something else inside. They may still have parameters
            of their own.
        leaking: those that return a part, because they use their input for more than projections.
    """
    without, whole = ({as_pattern(name) for name in found} for found in (unentered, leaking))
    found: dict[str, Style] = {}
    for name, style in styles.items():
        if as_pattern(name) not in without | whole:
            found[name] = style
        elif as_pattern(name) in whole - without:
            found[name] = "whole_sequence"
        elif any(True for _ in model.get_submodule(name).parameters(recurse=False)):
            found[name] = LOCAL
    return found


def _match_known(model: nn.Module, known: Mapping[str, Style], plan: TensorPlan) -> dict[str, Style]:
    compiled = {compile_pattern(pattern): style for pattern, style in known.items()}
    unfused = {name for name, module in model.named_modules() if isinstance(module, UnfusedProjection)}
    styles: dict[str, Style] = {}
    for name in rule_names(model):
        found = next((style for regex, style in compiled.items() if regex.fullmatch(name)), None)
        if found is not None and name not in unfused:
            styles[name] = found
    return _choose_experts(styles, plan)


def _choose_experts(styles: dict[str, Style], plan: TensorPlan) -> dict[str, Style]:
    if plan.experts == "tensor":
        return styles
    experts = [name for name, style in styles.items() if style == "moe_tp_experts"]
    of_experts = {name for name in styles if name.rpartition(".")[0] in experts}
    kept = {name: style for name, style in styles.items() if name not in of_experts}
    return kept | dict.fromkeys(experts, "expert_parallel")


def _ties(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield the pairs of names that one parameter has, in both orders."""
    for pair in model.all_tied_weights_keys.items():
        yield from (pair, pair[::-1])


def _ends(model: PreTrainedModel) -> dict[str, Style]:
    """Return the styles of embedding and head, which are cut by vocabulary where possible.

    If they share one weight, either both are cut or none.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = not getattr(embedding, "max_norm", None) and not getattr(embedding, "scale_grad_by_freq", False)
    rowwise = is_lookup(embedding) and plain
    if head is None:
        # A classifier has a small head instead, which is not cut.
        return {name_of(model, embedding): "embedding_rowwise" if rowwise else "replicate"}
    colwise = type(head) is nn.Linear
    ends = {f"{name_of(model, end)}.weight" for end in (embedding, head)}
    if any(name.startswith(f"{name_of(model, head)}.") and not {name, source} <= ends for name, source in _ties(model)):
        # BERT's head has a second name for its bias, in a module that is not cut.
        colwise = False
    if embedding.weight is head.weight:
        rowwise = colwise = rowwise and colwise
    return {
        name_of(model, embedding): "embedding_rowwise" if rowwise else "replicate",
        name_of(model, head): "colwise_gather_output" if colwise else "replicate",
    }


def _as_patterns(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return the styles by pattern: one for the modules of all layers where their styles agree."""
    groups: dict[str, set[Style | None]] = defaultdict(set)
    for name in rule_names(model):
        owner, _, kind = name.rpartition(".")
        module = getattr(model.get_submodule(owner), kind)
        if name in styles or not isinstance(module, nn.Module) or any(True for _ in module.parameters()):
            groups[as_pattern(name)].add(styles.get(name))
    return {as_pattern(name) if len(groups[as_pattern(name)]) == 1 else name: style for name, style in styles.items()}
