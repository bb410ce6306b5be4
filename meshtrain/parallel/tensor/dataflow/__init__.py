"""Derive tensor rules from what a model computes.

Modules:
    blocks: divides features into blocks that do not mix: heads, groups of heads, channels.
    halves: finds out whether rules compute what a model computes.
    places: puts the cuts of all layers together that are alike.
    reach: finds out which outputs of projections reach which inputs of other projections.
    shares: says how wide the parts of a fused projection are.
    trial: finds out which numbers of a module count heads or channels.

The package itself has `derive_rules`, and `where_rules_fail` for rules from elsewhere. Both compute
with a tiny copy of the model, so nothing depends on the names that a class uses.
"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.compat.casts import float32_casts_lifted
from meshtrain.compat.transformers import attention_implementation, build, set_attention_implementation, supports_sdpa
from meshtrain.config.plan import Style
from meshtrain.errors import ModelError
from meshtrain.models.build import REFUSALS, refusal_reason, stock_class, stock_model
from meshtrain.models.fused import Parts, unfuse
from meshtrain.models.patterns import as_pattern, compile_pattern
from meshtrain.models.tiny import key_value_heads
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.tensor.dataflow.blocks import Cut, Part, find_cuts
from meshtrain.parallel.tensor.dataflow.halves import where_halves_differ
from meshtrain.parallel.tensor.dataflow.places import Place, cuts_alike, places_of
from meshtrain.parallel.tensor.dataflow.reach import Recording, reach_of, record, returned_directly
from meshtrain.parallel.tensor.dataflow.shares import PARTS, Share, find_shares, part_names
from meshtrain.parallel.tensor.dataflow.trial import WAYS, Local, find_local, head_count, modules_around
from meshtrain.parallel.tensor.requirements import mla_rope_width
from meshtrain.parallel.tensor.rules import TensorRules, rule_names
from meshtrain.parallel.tiny_copy import (
    MAX_LAYERS,
    LayerKind,
    copy_with_all_kinds,
    kinds_of_layers,
    layer_kinds,
    tiny_config,
)

FEWEST_LAYERS = 4
MANY_HEADS, MANY_KEYS = 12, 4
BATCH, LENGTH, NOISE = 2, 8, 0.05


@dataclass
class DerivedRules:
    """Rules by pattern, as in a `TensorPlan`, for all modules that can be cut."""

    styles: dict[str, Style] = field(default_factory=dict)
    fused: dict[str, list[str] | dict[str, int | str]] = field(default_factory=dict)
    local_attributes: dict[str, list[str]] = field(default_factory=dict)
    local_inputs: dict[str, list[str]] = field(default_factory=dict)


def derive_rules(model: PreTrainedModel) -> DerivedRules:
    """Derive the rules of a model from what a tiny copy of it computes.

    Args:
        model: stock, on the meta device; it is not changed.

    Raises:
        ModelError: if there is no tiny copy with all kinds of its layers.
    """
    # Two processes do not share key-value heads here, if there are two: what they share must not
    # pass for what one process computes.
    tiny = _tiny_model(model, WAYS)
    with float32_casts_lifted():
        found = _derive(tiny, partial(_larger_copy, model))
    return _for_model(model, found)


def where_rules_fail(
    model: PreTrainedModel,
    tp: int,
    fused: Mapping[str, Parts],
    rules_of: Callable[[PreTrainedModel], TensorRules],
) -> str | None:
    """Return the module of a tiny copy that rules from elsewhere would compute wrongly.

    Args:
        model: stock, on the meta device; it is not changed.
        tp: number of processes that will share a layer.
        fused: pattern -> parts, of the rules.
        rules_of: unfused copy on the meta device -> its rules over two processes.

    Returns:
        None if two processes compute what one computes.

    Raises:
        ModelError: if there is no tiny copy with all kinds of its layers.
        PlanError: if the rules cannot be followed.
    """
    tiny = _tiny_model(model, tp)
    on_meta = _on_meta(type(tiny), tiny.config)
    for copied in (tiny, on_meta):
        unfuse(copied, fused)
    rules = rules_of(on_meta)
    with float32_casts_lifted():
        return where_halves_differ(tiny, _inputs(tiny), rules)


def _inputs(tiny: PreTrainedModel) -> dict[str, Tensor]:
    stream = torch.Generator().manual_seed(1)
    vocabulary = tiny.config.get_text_config().vocab_size
    # Without tokens for padding and the like, if there are others.
    first = 2 if vocabulary > 3 else 0
    return {"input_ids": torch.randint(first, vocabulary, (BATCH, LENGTH), generator=stream)}


def _derive(tiny: PreTrainedModel, larger: Callable[[], PreTrainedModel]) -> dict[LayerKind, DerivedRules]:
    """Return the rules for each kind of layer of a model with values, by name inside the layer.

    Args:
        tiny: with values.
        larger: builds a copy with more heads.
    """
    inputs = _inputs(tiny)
    recording = record(copy.deepcopy(tiny), inputs)
    cuts = [cut for cut in _find_cuts(recording, recording.calls) if _has_rules(cut, tiny)]
    shares = _shares(tiny, larger, cuts)
    cuts = [cut for cut in cuts if all(shares.get(as_pattern(name), ()) is not None for name in cut.columns)]
    places = places_of(tiny, cuts, recording.calls)
    rules: dict[LayerKind, DerivedRules] = defaultdict(DerivedRules)
    for same in cuts_alike(cuts, places):
        local = find_local(tiny, inputs, recording, same)
        if local is not None and not any(_is_alone(pattern, same) for pattern, _ in local.attributes):
            _add(rules, same[0], places, tiny, shares)
            _add_local(rules, same[0], local, places)
    return rules


def _find_cuts(recording: Recording, rows: Iterable[str]) -> Iterator[Cut]:
    return find_cuts({name: reach_of(recording, name) for name in rows}, returned_directly(recording))


def _larger_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy in which the numbers of heads are in another proportion."""
    keys, heads = key_value_heads(model.config), head_count(model)
    grouped = keys is not None and heads is not None and 1 < keys < heads
    return _tiny_model(model, WAYS, heads=MANY_HEADS, keys=MANY_KEYS if grouped else None)


def _shares(
    tiny: PreTrainedModel, larger: Callable[[], PreTrainedModel], cuts: Sequence[Cut]
) -> dict[str, tuple[Share, ...] | None]:
    """Return pattern of a fused projection -> the shares of its parts.

    None stands for shares that nothing tells.
    """
    config = tiny.config.get_text_config()
    fused = {
        as_pattern(name): (parts, cut.rows)
        for cut in cuts
        for name, parts in cut.columns.items()
        if len(_columns(parts, config) or ()) > 1
    }
    if not fused:
        return {}
    try:
        other = larger()
    except ModelError:
        # These projections stay whole, because nothing tells what their widths count.
        return dict.fromkeys(fused)
    recording = record(copy.deepcopy(other), _inputs(other))
    rows = dict.fromkeys(row for _, rows in fused.values() for row in rows)
    found = {as_pattern(name): parts for cut in _find_cuts(recording, rows) for name, parts in cut.columns.items()}
    configs = tiny.config, other.config
    return {name: find_shares(parts, found.get(name, ()), configs) for name, (parts, _) in fused.items()}


def _for_model(model: PreTrainedModel, found: Mapping[LayerKind, DerivedRules]) -> DerivedRules:
    """Return rules by pattern, from those of each kind of layer."""
    layers, _ = find_layers(model)
    kinds = kinds_of_layers(model)
    inside = [[name for name in rule_names(model) if name.startswith(f"{layers}.{i}.")] for i in range(len(kinds))]
    rules = DerivedRules()
    for table in (it.name for it in fields(DerivedRules)):
        in_kind = {kind: getattr(found[kind], table) if kind in found else {} for kind in kinds}
        for pattern in dict.fromkeys(pattern for known in in_kind.values() for pattern in known):
            of_layers = [in_kind[kind].get(pattern) for kind in kinds]
            others = [index for index, rule in enumerate(of_layers) if rule != next(filter(None, of_layers))]
            if not any(_matches(f"{layers}.*{pattern}", inside[index]) for index in others):
                getattr(rules, table)[f"{layers}.*{pattern}"] = next(filter(None, of_layers))
                continue
            for index, rule in enumerate(of_layers):
                if rule is not None:
                    getattr(rules, table)[f"{layers}.{index}{pattern}"] = rule
    return rules


def _matches(pattern: str, names: Iterable[str]) -> bool:
    regex = compile_pattern(pattern)
    return any(regex.fullmatch(name) for name in names)


def _tiny_model(model: PreTrainedModel, tp: int, **heads: Any) -> PreTrainedModel:
    """Return a tiny copy of a model with random values, in float64 on the CPU.

    Args:
        heads: numbers of heads other than those of `tiny_config`.
    """
    kind = stock_class(model)
    make = partial(tiny_config, model.config, tp=tp, **heads)
    numbers = range(min(FEWEST_LAYERS, model.config.get_text_config().num_hidden_layers), MAX_LAYERS + 1)
    _, config, _ = copy_with_all_kinds(layer_kinds(model), numbers, make, partial(_on_meta, kind))
    implementation = attention_implementation(model.config)
    if implementation not in ("eager", "sdpa"):
        # The other implementations are kernels for one kind of device.
        implementation = "sdpa" if supports_sdpa(kind) else "eager"
    set_attention_implementation(config, implementation)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = build(kind, config, torch.float64)
        for parameter in built.parameters():
            # Some parameters start as zeros, which let nothing through.
            noise = torch.randn(parameter.shape, dtype=torch.float64)
            parameter.data = parameter.data.to(torch.float64) + NOISE * noise
    return built.train()


def _on_meta(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    try:
        return stock_model(kind, config, torch.float32)
    except REFUSALS as error:
        raise ModelError(
            f"transformers cannot build a tiny {config.model_type} model: {refusal_reason(error)}"
        ) from error


def _has_rules(cut: Cut, model: PreTrainedModel) -> bool:
    """Return whether styles exist for all parts of a cut."""
    config = model.config.get_text_config()
    known = all(_columns(parts, config) is not None for parts in cut.columns.values())
    return known and all(_is_local(name, dim, cut, model) for name, dim in cut.parameters.items())


def _columns(parts: Sequence[Part], config: PretrainedConfig) -> tuple[Style, ...] | None:
    """Return the styles of the outputs of a projection: one, or one for each of its fused parts."""
    kinds = [part.kind for part in parts]
    if kinds == ["whole", "shared"] and parts[1].width == mla_rope_width(config):
        return ("mla_kv_a_proj",)
    if "whole" in kinds or len(parts) > len(PARTS) or (len(parts) > 1 and "cut" not in kinds):
        return None
    return tuple("colwise" if kind == "cut" else "replicated_with_grad_allreduce" for kind in kinds)


def _is_local(name: str, dim: int | None, cut: Cut, model: PreTrainedModel) -> bool:
    """Return whether a process can compute with its part of a parameter."""
    layers, _ = find_layers(model)
    if dim is None or not name.startswith(f"{layers}."):
        return False
    owner = name.rpartition(".")[0]
    if _contains_projection(owner, cut):
        return dim == max(0, model.get_parameter(name).dim() - 2)
    inside = {f"{owner}.{kind}" for kind, _ in model.get_submodule(owner).named_parameters()}
    return dim == 0 and inside <= cut.parameters.keys()


def _is_alone(pattern: str, cuts: Sequence[Cut]) -> bool:
    """Return whether a pattern is for modules with parameters of their own for each block."""
    owners = ((name.rpartition(".")[0], cut) for cut in cuts for name in cut.parameters)
    return any(as_pattern(owner) == pattern and not _contains_projection(owner, cut) for owner, cut in owners)


def _contains_projection(owner: str, cut: Cut) -> bool:
    return any(name.startswith(f"{owner}.") for name in (*cut.columns, *cut.rows))


def _add(
    rules: Mapping[LayerKind, DerivedRules],
    cut: Cut,
    places: Mapping[str, Place],
    tiny: PreTrainedModel,
    shares: Mapping[str, tuple[Share, ...] | None],
) -> None:
    """Add the rules of cuts that are alike, by pattern inside the layer.

    A cut may span layers of several kinds, if a layer reuses keys and values of another.
    """

    def give(name: str, style: Style, suffix: str = "") -> None:
        rules[places[name].kind].styles[f"{places[name].pattern}{suffix}"] = style

    for name, parts in cut.columns.items():
        styles, place = _columns(parts, tiny.config.get_text_config()), places[name]
        assert styles is not None, "a cut without rules"
        if len(styles) == 1:
            give(name, styles[0])
            continue
        of_parts = shares[as_pattern(name)]
        assert of_parts is not None, "a fused projection without shares"
        table = dict(zip(part_names(of_parts), of_parts, strict=True))
        rules[place.kind].fused[place.pattern] = [*table] if len({*of_parts}) == 1 else table
        for part, style in zip(table, styles, strict=True):
            give(name, style, f".{part}")
    for name in cut.rows:
        give(name, "rowwise")
    for name in cut.parameters:
        owner = name.rpartition(".")[0]
        if _contains_projection(owner, cut):
            give(owner, "local_params")
            give(name, "colwise")
        else:
            give(owner, "per_head")


def _add_local(rules: Mapping[LayerKind, DerivedRules], cut: Cut, local: Local, places: Mapping[str, Place]) -> None:
    """Add what the modules around cuts that are alike see of one process, by pattern."""
    around = dict.fromkeys(places[name] for name in sorted(modules_around(cut)))
    for table in (it.name for it in fields(Local)):
        for (pattern, name), place in itertools.product(getattr(local, table), around):
            if pattern.endswith(f"*{place.pattern}"):
                found = getattr(rules[place.kind], f"local_{table}").setdefault(place.pattern, [])
                found += [name] if name not in found else []
