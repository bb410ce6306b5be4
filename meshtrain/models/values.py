"""Find impossible values in a model's configuration that transformers accepts without an error.

There is no list of model types. The purpose of a value follows from its name, by the naming habits
of transformers, from its default, and from the annotation of the configuration class.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from transformers import PretrainedConfig

from meshtrain.config.problems import dotted

LARGEST_SIZE, LARGEST_NUMBER, MOST_LAYERS = 10**9, 1e12, 10_000
# Names that all configurations share. The attribute map of a class links them to its own names.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings")
_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_PROBABILITY = ("dropout", "pdrop", "drop_prob", "layerdrop", "drop_path")
_EPSILON = ("eps", "epsilon")
# An id or an index may be negative: it is then counted from the end, or means that there is none.
_INDEX = ("id", "ids", "idx", "idxs", "index", "layer", "layers")


def value_problems(config: PretrainedConfig, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each number that cannot be intended.

    Args:
        config: has the defaults that the values replace.
        values: name -> value, as in `model.config`.
    """
    standard = {config.attribute_map.get(name, name): name for name in (*_SIZES, *_COUNTS)}
    defaults, integers = config.to_dict(), _integer_names(type(config))
    for name, value in values.items():
        default = 0 if defaults.get(name) is None and name in integers else defaults.get(name)
        yield from _problems(dotted(("model", "config", name)), standard.get(name, name), value, default)


def _integer_names(kind: type[PretrainedConfig]) -> set[str]:
    """Return the names that a configuration class annotates with int but not with float."""
    hints = {field.name: {field.type, *get_args(field.type)} for field in dataclasses.fields(kind)}
    return {name for name, hint in hints.items() if int in hint and float not in hint}


def _problems(key: str, name: str, value: Any, default: Any) -> Iterator[str]:
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
            yield f"{key} = {value!r}: set it to {wanted}"


def _wanted(name: str, value: float, default: Any) -> str | None:
    """Return a description of the numbers that are allowed, or None if this one is allowed."""
    words = name.lower().split("_")
    if not math.isfinite(value):
        # Mamba's default is infinity, which stands for an unlimited value.
        return None if _has_infinity(default) else "a finite number"
    if any(part in name.lower() for part in _PROBABILITY):
        return None if 0 <= value < 1 else "a probability from 0 below 1"
    if any(word in _EPSILON for word in words):
        is_off = value == 0 and default == 0
        return None if 0 < value < 1 or is_off else "a number above 0 and below 1"
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
