"""Derive tensor rules from what a model computes.

Modules:
    blocks: divides features into blocks that do not mix: heads, groups of heads, channels.
    reach: finds out which outputs of projections reach which inputs of other projections.
    trial: finds out which numbers of a module count heads or channels.

The package itself has `derive_rules`. It computes with a tiny copy of the model, so nothing depends
on the names that a class uses.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.compat.casts import float32_casts_lifted
from meshtrain.compat.transformers import attention_implementation, build, set_attention_implementation, supports_sdpa
from meshtrain.config.plan import Style
from meshtrain.models.build import stock_class, stock_model
from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.tensor.dataflow.blocks import Cut, Part, find_cuts
from meshtrain.parallel.tensor.dataflow.reach import reach_of, record, returned_directly
from meshtrain.parallel.tensor.dataflow.trial import Attribute, local_attributes
from meshtrain.parallel.tensor.requirements import mla_rope_width
from meshtrain.parallel.tiny_copy import MAX_LAYERS, copy_with_all_kinds, layer_kinds, tiny_config

FEWEST_LAYERS = 4
BATCH, LENGTH, NOISE = 2, 8, 0.05
PARTS = ("first", "second", "third", "fourth", "fifth", "sixth")


@dataclass
class DerivedRules:
    """Rules by pattern, as in a `TensorPlan`, for all modules that can be cut."""

    styles: dict[str, Style] = field(default_factory=dict)
    fused: dict[str, list[str] | dict[str, int | str]] = field(default_factory=dict)
    local_attributes: dict[str, list[str]] = field(default_factory=dict)


def derive_rules(model: PreTrainedModel, tp: int) -> DerivedRules:
    """Derive the rules of a model from what a tiny copy of it computes.

    Args:
        model: stock, on the meta device; it is not changed.
        tp: number of processes that will share a layer.

    Raises:
        ModelError: if there is no tiny copy with all kinds of its layers.
    """
    tiny = _tiny_model(model, tp)
    with float32_casts_lifted():
        return _derive(tiny)


def _derive(tiny: PreTrainedModel) -> DerivedRules:
    """Return the rules of a model with values, in float64."""
    stream = torch.Generator().manual_seed(1)
    vocabulary = tiny.config.get_text_config().vocab_size
    inputs = {"input_ids": torch.randint(2, vocabulary, (BATCH, LENGTH), generator=stream)}
    recording = record(copy.deepcopy(tiny), inputs)
    reached = {name: reach_of(recording, name) for name in recording.calls}
    cuts = [cut for cut in find_cuts(reached, returned_directly(recording)) if _has_rules(cut, tiny)]
    rules = DerivedRules()
    patterns = _patterns(cuts, recording.calls, find_layers(tiny)[0])
    for same in _kinds(cuts, patterns):
        attributes = local_attributes(tiny, inputs, recording, same)
        if attributes is not None and not any(_is_alone(pattern, same) for pattern, _ in attributes):
            _add(rules, same[0], attributes, patterns, tiny.config.get_text_config())
    return rules


def _tiny_model(model: PreTrainedModel, tp: int) -> PreTrainedModel:
    """Return a tiny copy of a model with random values, in float64 on the CPU."""
    kind = stock_class(model)
    make = partial(tiny_config, model.config, tp=tp)
    numbers = range(FEWEST_LAYERS, MAX_LAYERS + 1)
    _, config, _ = copy_with_all_kinds(
        layer_kinds(model), numbers, make, lambda tiny: stock_model(kind, tiny, torch.float32)
    )
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


def _has_rules(cut: Cut, model: PreTrainedModel) -> bool:
    """Return whether styles exist for all parts of a cut."""
    config = model.config.get_text_config()
    known = all(_column(parts, config) is not None for parts in cut.columns.values())
    return known and all(_is_local(name, dim, cut, model) for name, dim in cut.parameters.items())


def _column(parts: Sequence[Part], config: PretrainedConfig) -> tuple[Style, int] | None:
    """Return the style of the outputs of a projection, and the number of its fused parts."""
    kinds, widths = [part.kind for part in parts], {part.width for part in parts}
    if kinds == ["shared"]:
        return "replicated_with_grad_allreduce", 1
    if kinds == ["whole", "shared"] and parts[1].width == mla_rope_width(config):
        return "mla_kv_a_proj", 1
    if set(kinds) == {"cut"} and len(widths) == 1 and len(parts) <= len(PARTS):
        return "colwise", len(parts)
    return None


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
    owners = {name.rpartition(".")[0] for cut in cuts for name in cut.parameters}
    return any(as_pattern(owner) == pattern and not _contains_projection(owner, cuts[0]) for owner in owners)


def _contains_projection(owner: str, cut: Cut) -> bool:
    return any(name.startswith(f"{owner}.") for name in (*cut.columns, *cut.rows))


def _kinds(cuts: Sequence[Cut], patterns: Mapping[str, str]) -> Iterator[list[Cut]]:
    """Yield the cuts of each kind, if all projections that share a pattern are cut alike."""
    kinds: dict[str, list[Cut]] = defaultdict(list)
    treated: dict[str, set[str]] = defaultdict(set)
    for cut in cuts:
        kinds[kind := _kind(cut, patterns)].append(cut)
        for name in (*cut.columns, *cut.rows):
            treated[name].add(kind)
    alike: dict[str, set[frozenset[str]]] = defaultdict(set)
    for name, pattern in patterns.items():
        alike[pattern].add(frozenset(treated[name]))
    for same in kinds.values():
        if all(len(alike[patterns[name]]) == 1 for cut in same for name in (*cut.columns, *cut.rows)):
            yield same


def _kind(cut: Cut, patterns: Mapping[str, str]) -> str:
    columns = sorted({f"{patterns[name]} {parts}" for name, parts in cut.columns.items()})
    return str((columns, sorted({patterns[name] for name in cut.rows})))


def _patterns(cuts: Sequence[Cut], projections: Iterable[str], layers: str) -> dict[str, str]:
    """Return projection -> pattern.

    Numbers after the layer's are replaced too, as those of experts, unless projections that differ
    in them have different parts in a cut, as those of an `nn.Sequential`.
    """
    parts: dict[str, set[str]] = defaultdict(set)
    for cut in cuts:
        for name in (*cut.columns, *cut.rows):
            parts[as_pattern(name)].add(str(cut.columns.get(name)))
    regex = re.compile(rf"({re.escape(layers)}\.)\d+")
    return {
        name: as_pattern(name) if len(parts[as_pattern(name)]) < 2 else regex.sub(r"\1*", name) for name in projections
    }


def _add(
    rules: DerivedRules,
    cut: Cut,
    attributes: Sequence[Attribute],
    patterns: Mapping[str, str],
    config: PretrainedConfig,
) -> None:
    """Add the rules of one kind of cut."""
    for name, parts in cut.columns.items():
        column, pattern = _column(parts, config), patterns[name]
        assert column is not None, "a cut without rules"
        style, count = column
        if count == 1:
            rules.styles[pattern] = style
        else:
            rules.fused[pattern] = [*PARTS[:count]]
            rules.styles |= {f"{pattern}.{part}": style for part in PARTS[:count]}
    rules.styles |= {patterns[name]: "rowwise" for name in cut.rows}
    for name in cut.parameters:
        owner = name.rpartition(".")[0]
        if _contains_projection(owner, cut):
            rules.styles |= {as_pattern(owner): "local_params", as_pattern(name): "colwise"}
        else:
            rules.styles[as_pattern(owner)] = "per_head"
    for pattern, attribute in attributes:
        rules.local_attributes.setdefault(pattern, []).append(attribute)
