"""The record of proven flags over tp: `verify --models` writes it, runs read it."""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from meshtrain.config.reading import shipped_plans
from meshtrain.models.tiny import KEY_VALUE_HEADS
from meshtrain.verify.variants import Flags, Values, attention_heads, candidates

RECORD_NAME = "variants.json"


def record_of(flags: Flags, proven: Sequence[Values], heads: int | None) -> dict[str, Any]:
    """Return the record of one model type: what is proven of its flags, and the silent flags.

    Args:
        flags: of the type.
        proven: the variants that are proven, without the defaults in each.
        heads: number of attention heads by default.
    """
    variants = [
        {name: _word(name, variant.get(name, values[0]), heads) for name, values in flags.values.items()}
        for variant in proven
    ]
    found = {name: [*dict.fromkeys(variant[name] for variant in variants)] for name in flags.values}
    unproven = [
        pair
        for one, other in itertools.combinations(found, 2)
        for pair in ({one: a, other: b} for a in found[one] for b in found[other])
        if not any(pair.items() <= variant.items() for variant in variants)
    ]
    return {"proven": found, "unproven": unproven, "silent": [*flags.silent]}


def write_record(types: Mapping[str, Any], path: Path) -> None:
    """Write the record of each model type into a file. Other types in the file stay in it."""
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(dict(sorted({**before, **types}.items())), indent=1) + "\n")


def uncovered_flags(config: PretrainedConfig) -> list[str]:
    """Return the flags of a configuration, with their values, that no proof of its type covers.

    A proof covers single values and pairs of them.
    """
    text = config.get_text_config()
    known = _load().get(text.model_type)
    if known is None:
        return [f"model_type = {text.model_type}"]
    values, heads = text.to_dict(), attention_heads(text)
    proven: Mapping[str, list[Any]] = known["proven"]
    # A value that the class does not define has no effect.
    read = type(text)().to_dict()
    others = (name for name in candidates(text) if name in read and name not in known["silent"])
    words = {name: _word(name, values[name], heads) for name in dict.fromkeys([*proven, *others]) if name in values}
    alone = [name for name, word in words.items() if word not in proven.get(name, [])]
    together = [name for pair in known["unproven"] if pair.items() <= words.items() for name in pair]
    return [f"{name} = {values[name]}" for name in dict.fromkeys([*alone, *together])]


def _word(name: str, value: Any, heads: int | None) -> Any:
    """Return the recorded value of a flag. A number of key-value heads becomes one, some or all."""
    if name not in KEY_VALUE_HEADS:
        return value
    return "one" if value == 1 else "all" if value in (None, heads) else "some"


@functools.cache
def _load() -> dict[str, Any]:
    path = Path(str(shipped_plans() / RECORD_NAME))
    found: dict[str, Any] = json.loads(path.read_text())
    return found
