"""Find impossible values in a model's configuration that transformers accepts without an error.

There is no list of model types. The purpose of a value follows from its name, by the naming habits
of transformers, from its default, and from the annotation of the configuration class.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from transformers import PretrainedConfig

from meshtrain.config.problems import dotted, shortened
from meshtrain.errors import Problem

LARGEST_SIZE, LARGEST_NUMBER, MOST_LAYERS = 10**9, 1e12, 10_000
# Names that all configurations share. The attribute map of a class links them to its own names.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings")
# A width that follows from another one if it is left out, and the labels of a classifier.
_AT_LEAST_ONE = ("n_inner", "ffn_dim", "num_labels")
_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_PROBABILITY = ("dropout", "pdrop", "drop_prob", "layerdrop", "drop_path")
_EPSILON = ("eps", "epsilon")
# An id or an index may be negative: it is then counted from the end, or means that there is none.
_INDEX = ("id", "ids", "idx", "idxs", "index", "layer", "layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# No released configuration has as much; an initial standard deviation of 100 is noise, not a model.
LARGEST_EPSILON, LARGEST_DEVIATION = 0.1, 100.0


def value_problems(config: PretrainedConfig, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield one problem for each number that cannot be intended.

    Args:
        config: has the defaults that the values replace.
        values: name -> value, as in `model.config`.
    """
    standard = {config.attribute_map.get(name, name): name for name in (*_SIZES, *_COUNTS)}
    defaults, integers = config.to_dict(), _integer_names(type(config))
    yield from _contradictions(defaults, values)
    for name, value in values.items():
        default = 0 if defaults.get(name) is None and name in integers else defaults.get(name)
        yield from _problems(dotted(("model", "config", name)), standard.get(name, name), value, default)


def _contradictions(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Problem]:
    all_values = {**defaults, **values}
    for name in ("dtype", "torch_dtype"):
        if (dtype := values.get(name)) is not None and not _is_dtype(dtype):
            found = f"model.config.{name} = {shortened(repr(dtype))}"
            yield Problem(found, "set it to the name of a dtype of torch, such as 'bfloat16'")
    vocabulary = all_values.get("vocab_size")
    for name in _TOKENS:
        # Some classes have default tokens outside of their default vocabulary.
        ids = values.get(name) if values.get(name) != defaults.get(name) else None
        for token in ids if isinstance(ids, list) else [ids]:
            if isinstance(token, int) and isinstance(vocabulary, int) and not -1 <= token < vocabulary:
                found = f"model.config.{name} = {shortened(repr(ids))}"
                yield Problem(found, f"set it to a token below vocab_size = {vocabulary:,}")
    chosen = all_values.get("num_experts_per_tok")
    for name in _EXPERTS:
        there = all_values.get(name)
        is_given = not values.keys().isdisjoint((name, "num_experts_per_tok"))
        if is_given and isinstance(there, int) and isinstance(chosen, int) and 0 < there < chosen:
            yield Problem(f"model.config.num_experts_per_tok = {chosen}", f"set it to at most {name} = {there}")


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype)


def _integer_names(kind: type[PretrainedConfig]) -> set[str]:
    """Return the names that a configuration class annotates with int but not with float."""
    hints = {field.name: {field.type, *get_args(field.type)} for field in dataclasses.fields(kind)}
    return {name for name, hint in hints.items() if int in hint and float not in hint}


def _problems(key: str, name: str, value: Any, default: Any) -> Iterator[Problem]:
    if isinstance(value, dict):
        for part, below in value.items():
            yield from _problems(
                f"{key}.{dotted((str(part),))}",
                str(part),
                below,
                default.get(part) if isinstance(default, dict) else None,
            )
    elif isinstance(value, list | tuple):
        found = (problem for entry in value for problem in _problems(key, name, entry, default))
        yield from dict.fromkeys(found)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        wanted = _wanted(name, value, default)
        if wanted is not None:
            yield Problem(f"{key} = {shortened(repr(value))}", f"set it to {wanted}")


def _wanted(name: str, value: float, default: Any) -> str | None:
    """Return a description of the numbers that are allowed, or None if this one is allowed."""
    words = name.lower().split("_")
    if isinstance(value, float) and not math.isfinite(value):
        # Mamba's default is infinity, which stands for an unlimited value.
        return None if _has_infinity(default) else "a finite number"
    if any(part in name.lower() for part in _PROBABILITY):
        return None if 0 <= value < 1 else "a probability from 0 below 1"
    if any(word in _EPSILON for word in words):
        is_off = value == 0 and default == 0
        return None if 0 < value <= LARGEST_EPSILON or is_off else f"a number above 0, up to {LARGEST_EPSILON}"
    if name.endswith(("initializer_range", "init_std")) and value > LARGEST_DEVIATION:
        return f"a number up to {LARGEST_DEVIATION:g}"
    if name == "partial_rotary_factor" and not 0 <= value <= 1:
        return "a number from 0 to 1"
    if name in _AT_LEAST_ONE and value < 1:
        return "a whole number from 1"
    if name in _SIZES or name in _COUNTS:
        most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST_SIZE
        # XLNet has -1, which means that the number of positions is not limited.
        return None if 1 <= value <= most or value == default else f"a whole number from 1 to {most:,}"
    is_integer = isinstance(default, int) or (default is None and isinstance(value, int))
    largest = LARGEST_SIZE if is_integer else LARGEST_NUMBER
    if abs(value) > largest:
        return f"a number up to {largest:,.0f}"
    is_never_negative = isinstance(default, int | float) and (
        default > 0 or (default == 0 and isinstance(default, int))
    )
    if value < 0 and is_never_negative and words[-1] not in _INDEX:
        return "a number from 0"
    return None


def _has_infinity(default: Any) -> bool:
    if isinstance(default, list | tuple):
        return any(map(_has_infinity, default))
    return isinstance(default, float) and not math.isfinite(default)
