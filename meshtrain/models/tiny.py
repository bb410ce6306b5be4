"""Tiny configurations of a model class that still have every part of it."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise, zip_longest
from types import MappingProxyType
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from meshtrain.compat.transformers import PATH_KEY
from meshtrain.errors import ModelError
from meshtrain.models.refusals import REFUSALS, refusal_reason
from meshtrain.models.rotary import rope_tables
from meshtrain.models.tiny_sizes import (
    EXPERTS,
    HEAD_NAMES,
    HEAD_SIZE,
    HEADS,
    PART_SIZES,
    VOCABULARY,
    WIDTH_NAMES,
    WINDOW,
    sizes_of,
)
from meshtrain.models.whole.causal_class import WHOLE_KEY, is_half

SHORT = 8
"""Longer sequences have other rotary frequencies, in a model where these depend on the length."""
# Norms of small values amplify rounding in training: 100 times per step in Gemma 4, whose attention
# has no scale.
NORM_EPSILON = 1e-2
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "swa_num_key_value_heads")
LAYER_COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers", "num_blocks", "num_layers")
# Width of a head of latent attention, and of the two parts that it may consist of.
LATENT_HEAD = ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
# (Width of the state relative to that of the model, number of heads that it is split into).
STATE_HEADS = (("mamba_expand", "mamba_n_heads"), ("expand", "num_heads"), ("expand", "mamba_num_heads"))
# Values for settings whose default is None although the class cannot be built with None.
UNSET = {
    "head_dim": HEAD_SIZE,
    "num_key_value_heads": 2,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 16,
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_SIZE,
    "indexer_budget": 2 * WINDOW,
    "indexer_compress_ratio": WINDOW // 2,
}
# Hybrids that have no attention by default, although it is what makes them hybrids.
_EVERY_FOURTH = range(1, 32, 4)
HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [*_EVERY_FOURTH]},
    "granitemoehybrid": {
        "layer_types": ["full_attention" if index in _EVERY_FOURTH else "linear_attention" for index in range(32)]
    },
}
NOT_VALUES = ("model_type", "transformers_version", "architectures", PATH_KEY, "dtype", "auto_map")


def default_config(model_type: str, changes: Mapping[str, Any] = MappingProxyType({})) -> PretrainedConfig:
    """Return a buildable default configuration of the language model of a type.

    Bamba and GraniteMoeHybrid have attention in every fourth layer, not in none.

    Args:
        changes: values other than the defaults.

    Raises:
        ModelError: if there is none.
    """
    try:
        config = AutoConfig.for_model(model_type, **HYBRIDS.get(model_type, {}) | dict(changes))
    except (*REFUSALS, NotImplementedError) as error:
        raise ModelError(f"{model_type!r} has no defaults: {refusal_reason(error)}") from error
    config = _language_model(config)
    values = config.to_dict()
    for name in UNSET.keys() & values.keys():
        if values[name] is None:
            setattr(config, name, UNSET[name])
    kinds = values.get("layer_types", ())
    if kinds is None:
        config.layer_types = ["conv", "full_attention"] * (config.num_hidden_layers // 2)
    elif values.get("rope_parameters") == {}:
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        config.rope_parameters = {kind: dict(rope) for kind in set(kinds)} if kinds else rope
    if values.get("is_decoder") is False:
        # Encoders with a causal LM class refuse without it, or attend to future tokens.
        config.is_decoder = True
    if values.get("languages") and hasattr(config, "default_language"):
        config.default_language = values["languages"][0]
    if values.get("axial_pos_embds"):
        # They fit one length of sequence only.
        config.axial_pos_embds = False
    return config


def _language_model(config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of a configuration that transformers builds a causal language model from."""
    try:
        text: PretrainedConfig = config.get_text_config()
    except ValueError as error:
        raise ModelError(
            f"a {config.model_type} configuration holds more than one text model, and transformers does not define "
            "which is the language model"
        ) from error
    return text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else config


def shrink(
    config: PretrainedConfig,
    num_layers: int,
    *,
    tp: int = 1,
    heads: int = HEADS,
    keys: int | None = None,
    short: int = SHORT,
    block: int = 1,
    in_turn: bool = False,
) -> PretrainedConfig:
    """Return a tiny configuration of the same class.

    Kinds of layers, norms, activation, tied weights and experts stay.

    Args:
        config: of a language model; it is not changed. Other models in it become small too.
        num_layers: of the copy. Every kind of layer is among them, if the number is large enough.
        tp: number of processes that will share a layer of the model itself. If they must share
            key-value heads, or do not divide its vocabulary, the same is true for the copy on 2
            processes.
        heads: number of attention heads of the copy.
        keys: number of key-value heads of the copy; None: one, some or all, as before.
        short: all sequences of up to this many tokens have the same rotary frequencies.
        block: as for `sizes_of`.
        in_turn: whether the kinds of layers take turns, so that a few layers have several of each.

    Raises:
        ModelError: if transformers refuses it.
    """
    text = config.get_text_config()
    if not hasattr(text, "num_hidden_layers"):
        parts = f"; it holds several models ({', '.join(config.sub_configs)})" if config.sub_configs else ""
        raise ModelError(f"a {config.model_type} configuration has no number of layers{parts}")
    try:
        sizes = sizes_of(heads, block)
        values = _small_values(text, num_layers, sizes, tp=tp, heads=heads, keys=keys, in_turn=in_turn)
        small = type(text)(**values | _small_rope(text, short, sizes["head_dim"]))
        if is_half(text):
            # A tiny copy has no folder, but the class that is made for a language half.
            setattr(small, WHOLE_KEY, True)
        if text is config:
            return small
        return type(config)(**_values(config) | _small_parts(config) | {"text_config": small.to_dict()})
    except (*REFUSALS, NotImplementedError) as error:
        reason = refusal_reason(error)
        raise ModelError(f"a {config.model_type} configuration cannot be made small: {reason}") from error


def _small_values(
    config: PretrainedConfig,
    num_layers: int,
    sizes: Mapping[str, int],
    *,
    tp: int,
    heads: int,
    keys: int | None,
    in_turn: bool,
) -> dict[str, Any]:
    values = _values(config)
    shared = min(values.get("num_kv_shared_layers") or 0, num_layers // 2)
    kept = _kept_layers(config, num_layers, shared, in_turn=in_turn)
    tiny = {name: _shrunk(name, value, sizes, kept, config.num_hidden_layers) for name, value in values.items()}
    tiny |= {_own_name(config, name): value for name, value in _heads(config, values, tp, heads, keys).items()}
    if heads > HEADS:
        # So many heads are wanted of a model that has fewer too.
        tiny |= {name: sizes[name] for name in (*WIDTH_NAMES, *HEAD_NAMES) if values.get(name)}
    tiny |= _small_parts(config)
    unchanged = {name for name, value in tiny.items() if value == values.get(name)}
    for name in _computed(config, values, unchanged - {*sizes, *KEY_VALUE_HEADS}):
        del tiny[name]
    if isinstance(values.get("per_layer_config"), dict):
        tiny["per_layer_config"] = _small_overrides(values, tiny, kept)
    if values.get("vocab_size", 0) % tp:
        tiny["vocab_size"] = VOCABULARY - 1
    if shared:
        tiny["num_kv_shared_layers"] = shared
    tiny |= {_own_name(config, name): num_layers for name in LAYER_COUNTS if _own_name(config, name) in values}
    return tiny | {name: token for name, token in TOKENS.items() if values.get(name) is not None}


def _computed(config: PretrainedConfig, values: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return those names whose values the class of a configuration computes from the others."""
    kind = type(config)
    if "__dataclass_fields__" not in vars(kind):
        return set()
    given = {field.name for field in dataclasses.fields(kind) if field.default is not None}
    possible = {
        name
        for name in names
        if name not in given and isinstance(values[name], (int, list)) and not isinstance(values[name], bool)
    }
    try:
        again = kind(**{name: value for name, value in values.items() if name not in possible}).to_dict()
    except REFUSALS:
        # The class needs these values, so it does not compute them.
        return set()
    return {name for name in possible if again.get(name) == values[name]}


def _small_rope(config: Any, short: int, head_size: int) -> dict[str, Any]:
    """Return the values that change where rotary frequencies depend on the sequence length."""
    tables = rope_tables(config)
    kinds = {str(table.get("rope_type")) for table in tables.values()}
    values: dict[str, Any] = {}
    if any("mrope_section" in table for table in tables.values()):
        parts = {layers: _small_sections(table, head_size) for layers, table in tables.items()}
        values["rope_parameters"] = parts.get(None) or config.rope_parameters | parts
    if "longrope" in kinds:
        small: dict[Any, Any] = {layers: _small_longrope(table, short, head_size) for layers, table in tables.items()}
        values["rope_parameters"] = small.get(None) or config.rope_parameters | small
        if hasattr(config, "original_max_position_embeddings"):
            values["original_max_position_embeddings"] = short
    if any("dynamic" in kind for kind in kinds):
        values[_own_name(config, "max_position_embeddings")] = short
    return values


def _small_sections(table: Mapping[str, Any], head_size: int) -> dict[str, Any]:
    """Return a table whose sections, for time, height and width, share the pairs of a tiny head."""
    if "mrope_section" not in table:
        return dict(table)
    sections = table["mrope_section"]
    pairs = int(head_size * table.get("partial_rotary_factor", 1.0)) // 2
    ends = [round(pairs * sum(sections[:number]) / sum(sections)) for number in range(len(sections) + 1)]
    return {**table, "mrope_section": [end - start for start, end in pairwise(ends)]}


def _small_longrope(table: Mapping[str, Any], short: int, head_size: int) -> dict[str, Any]:
    if table.get("rope_type") != "longrope":
        return dict(table)
    # One factor for each pair of rotated elements of a head.
    width = int(head_size * table.get("partial_rotary_factor", 1.0)) // 2
    factors = {
        name: [table[name][index * len(table[name]) // width] for index in range(width)]
        for name in ("short_factor", "long_factor")
    }
    return {**table, **factors, "original_max_position_embeddings": short}


def _values(config: PretrainedConfig) -> dict[str, Any]:
    # Attributes are not read, because some configurations have values per layer and raise an error.
    return {name: value for name, value in config.to_dict().items() if name not in NOT_VALUES}


def _own_name(config: PretrainedConfig, name: str) -> str:
    return config.attribute_map.get(name, name)


def _kept_layers(config: PretrainedConfig, num_layers: int, shared: int, *, in_turn: bool) -> list[int]:
    """Return the indices of the layers to keep.

    Taken in this order until there are enough: the first of every kind, the last that share, and
    then the second of every kind and so on (`in_turn`), or the first of all.
    """
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [None] * count
    of_kind = [[index for index, it in enumerate(kinds) if it == kind] for kind in dict.fromkeys(kinds)]
    turns = [index for turn in zip_longest(*of_kind) for index in turn if index is not None]
    first, rest = turns[: len(of_kind)], turns if in_turn else range(count)
    order = dict.fromkeys([*first, *range(count - shared, count), *rest])
    return sorted([*order][:num_layers])


def _shrunk(name: str, value: Any, sizes: Mapping[str, int], kept: list[int], num_layers: int) -> Any:
    if isinstance(value, list) and value == list(range(num_layers)) and all(type(it) is int for it in value):
        # It lists all layers, as Llama 4 does in `moe_layers`.
        return list(range(len(kept)))
    if isinstance(value, list) and len(value) == num_layers:
        return [_shrunk(name, value[index], sizes, [], -1) for index in kept]
    if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
        return {place: value[index] for place, index in enumerate(kept) if index in value}
    if isinstance(value, float) and ("drop" in name or "jitter" in name):
        return 0.0
    if isinstance(value, float) and "eps" in name and ("norm" in name or name == "eps"):
        return max(NORM_EPSILON, value)
    if name in sizes and isinstance(value, int) and value > 0:
        return min(sizes[name], value)
    return value


def _small_overrides(values: Mapping[str, Any], tiny: Mapping[str, Any], kept: list[int]) -> dict[int, dict[str, Any]]:
    """Return the kept layers' own values, in the same proportion to the common ones as before."""
    overrides = {int(index): own for index, own in values["per_layer_config"].items()}
    small = {}
    for place, index in enumerate(kept):
        own = overrides.get(index, {})
        small[place] = {
            name: max(1, value * tiny[name] // values[name]) if isinstance(value, int) and values.get(name) else value
            for name, value in own.items()
        }
        if all(name in values for name in LATENT_HEAD) and _is_sum({**values, **own}):
            after = {**tiny, **small[place]}
            small[place]["head_dim"] = after["qk_nope_head_dim"] + after["qk_rope_head_dim"]
    return {place: own for place, own in small.items() if own}


def _is_sum(values: Mapping[str, Any]) -> bool:
    whole, *parts = (values[name] for name in LATENT_HEAD)
    return bool(whole == sum(parts))


def _small_parts(config: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """Return the configurations of other models, such as an image encoder, made small."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs if name != "text_config"}
    return {
        name: {kind: _shrunk(kind, value, PART_SIZES, [], 0) for kind, value in _values(part).items()}
        for name, part in parts.items()
        if isinstance(part, PretrainedConfig)
    }


def key_value_heads(config: PretrainedConfig) -> int | None:
    """Return the number of key-value heads of a model, if its configuration has it."""
    values = config.to_dict()
    numbers = (values.get(_own_name(config, name)) for name in KEY_VALUE_HEADS)
    return next((number for number in numbers if isinstance(number, int) and number > 0), None)


def _heads(
    config: PretrainedConfig, values: Mapping[str, Any], tp: int, heads: int, keys: int | None
) -> dict[str, int]:
    """Return the numbers of key-value heads and of state-space heads.

    There are one, some or all key-value heads, as before.
    """
    found = {name: values.get(_own_name(config, name)) for name in KEY_VALUE_HEADS}
    whole = values.get(_own_name(config, "num_attention_heads"), heads)
    expand, name = next(((getattr(config, key), name) for key, name in STATE_HEADS if hasattr(config, key)), (0, ""))
    states = {name: int(expand * heads)} if getattr(config, name, None) else {}
    return states | {
        name: keys or (1 if number < max(2, tp) else heads // min(2, math.ceil(whole / number)))
        for name, number in found.items()
        if isinstance(number, int) and number > 0
    }
