"""Derive tensor rules from what a model computes.

Modules:
    blocks: divides features into blocks that do not mix: heads, groups of heads, channels.
    checks: finds out what rules over several processes would compute.
    copies: builds the tiny copies.
    head_labels: finds out which projections give and take heads.
    parts: runs a model as each of several processes.
    places: puts the cuts of all layers together that are alike.
    reach: finds out which outputs of projections reach which inputs of other projections.
    shares: says how wide the parts of a fused projection are.
    trial: finds out which numbers of a module count heads or channels.

The package itself has `derive_rules`. It computes with a tiny copy of the model, so nothing depends
on the names that a class uses.
"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.compat.casts import float32_casts_lifted
from meshtrain.config.plan import Style
from meshtrain.errors import ModelError
from meshtrain.models.patterns import as_pattern, compile_pattern
from meshtrain.models.tiny import key_value_heads
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.tensor.dataflow.blocks import Cut, Part, find_cuts
from meshtrain.parallel.tensor.dataflow.places import Place, cuts_alike, places_of
from meshtrain.parallel.tensor.dataflow.reach import Recording, reach_of, record, returned_directly
from meshtrain.parallel.tensor.dataflow.shares import PARTS, Share, find_shares, part_names
from meshtrain.parallel.tensor.dataflow.trial import WAYS, Local, find_local, head_count, modules_around
from meshtrain.parallel.tensor.requirements import mla_rope_width
from meshtrain.parallel.tensor.rules import rule_names
from meshtrain.parallel.tiny_copy import LayerKind, kinds_of_layers
from meshtrain.parallel.tiny_model import copies_must_run, inputs_of, tiny_model

MANY_HEADS, MANY_KEYS = 12, 4


@dataclass
class RuleTables:
    """Rules by pattern, as in a `TensorPlan`."""

    styles: dict[str, Style] = field(default_factory=dict)
    fused: dict[str, list[str] | dict[str, int | str]] = field(default_factory=dict)
    local_attributes: dict[str, list[str]] = field(default_factory=dict)
    local_inputs: dict[str, list[str]] = field(default_factory=dict)


def derive_rules(model: PreTrainedModel) -> RuleTables:
    """Derive the rules of a model from what a tiny copy of it computes.

    Args:
        model: stock, on the meta device; it is not changed.

    Raises:
        ModelError: if there is no tiny copy with all kinds of its layers.
    """
    # Two processes do not share key-value heads here, if there are two: what they share must not
    # pass for what one process computes.
    tiny = tiny_model(model, WAYS)
    with float32_casts_lifted(), copies_must_run(tiny):
        found = _derive(tiny, partial(_larger_copy, model))
    return _for_model(model, found)


def _derive(tiny: PreTrainedModel, larger: Callable[[], PreTrainedModel]) -> dict[LayerKind, RuleTables]:
    """Return the rules for each kind of layer of a model with values, by name inside the layer.

    Args:
        tiny: with values.
        larger: builds a copy with more heads.
    """
    inputs = inputs_of(tiny)
    recording = record(copy.deepcopy(tiny), inputs)
    cuts = [cut for cut in _find_cuts(recording, recording.calls) if _has_rules(cut, tiny)]
    shares = _shares(tiny, larger, cuts)
    cuts = [cut for cut in cuts if all(shares.get(as_pattern(name), ()) is not None for name in cut.columns)]
    places = places_of(tiny, cuts, recording.calls)
    rules: dict[LayerKind, RuleTables] = defaultdict(RuleTables)
    for same in cuts_alike(cuts, places):
        local = find_local(tiny, inputs, recording, same)
        if local is not None and not any(_is_alone(pattern, same) for pattern, _ in local.attributes):
            _add(rules, same[0], places, tiny, shares)
            _add_local(rules, same[0], local, places)
    return rules


def _find_cuts(recording: Recording, rows: Iterable[str]) -> Iterator[Cut]:
    return find_cuts({name: reach_of(recording, name) for name in rows}, returned_directly(recording), WAYS)


def _larger_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy in which the numbers of heads are in another proportion."""
    keys, heads = key_value_heads(model.config), head_count(model)
    grouped = keys is not None and heads is not None and 1 < keys < heads
    return tiny_model(model, WAYS, heads=MANY_HEADS, keys=MANY_KEYS if grouped else None)


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
    recording = record(copy.deepcopy(other), inputs_of(other))
    rows = dict.fromkeys(row for _, rows in fused.values() for row in rows)
    found = {as_pattern(name): parts for cut in _find_cuts(recording, rows) for name, parts in cut.columns.items()}
    configs = tiny.config, other.config
    return {name: find_shares(parts, found.get(name, ()), configs) for name, (parts, _) in fused.items()}


def _for_model(model: PreTrainedModel, found: Mapping[LayerKind, RuleTables]) -> RuleTables:
    """Return rules by pattern, from those of each kind of layer."""
    layers, _ = find_layers(model)
    kinds = kinds_of_layers(model)
    inside = [[name for name in rule_names(model) if name.startswith(f"{layers}.{i}.")] for i in range(len(kinds))]
    rules = RuleTables()
    for table in (it.name for it in fields(RuleTables)):
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
    if not name.startswith(f"{layers}."):
        return False
    owner = cut.owner_of(name)
    if cut.contains_projection(owner):
        return dim == max(0, model.get_parameter(name).dim() - 2)
    inside = {f"{owner}.{kind}" for kind, _ in model.get_submodule(owner).named_parameters()}
    return inside <= cut.parameters.keys()


def _is_alone(pattern: str, cuts: Sequence[Cut]) -> bool:
    """Return whether a pattern is for modules with parameters of their own for each block."""
    owners = ((cut.owner_of(name), cut) for cut in cuts for name in cut.parameters)
    return any(as_pattern(owner) == pattern and not cut.contains_projection(owner) for owner, cut in owners)


def _add(
    rules: Mapping[LayerKind, RuleTables],
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
        owner = cut.owner_of(name)
        if cut.contains_projection(owner):
            give(owner, "local_params")
            give(name, "colwise")
        else:
            give(owner, "per_head")


def _add_local(rules: Mapping[LayerKind, RuleTables], cut: Cut, local: Local, places: Mapping[str, Place]) -> None:
    """Add what the modules around cuts that are alike see of one process, by pattern."""
    around = dict.fromkeys(places[name] for name in sorted(modules_around(cut)))
    for table in (it.name for it in fields(Local)):
        for (pattern, name), place in itertools.product(getattr(local, table), around):
            if pattern.endswith(f"*{place.pattern}"):
                found = getattr(rules[place.kind], f"local_{table}").setdefault(place.pattern, [])
                found += [name] if name not in found else []
