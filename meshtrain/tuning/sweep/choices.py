"""Lists of values for keys, as on the command line, and the combinations of these values."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from meshtrain.config.problems import dotted, shortened
from meshtrain.config.tables import Key, leaves
from meshtrain.config.toml import read_overrides
from meshtrain.errors import ConfigError, Problem

MOST_RUNS = 1000
"""Runs of a sweep at most. Slurm refuses larger arrays too, unless the site allows them."""
LONGEST_TEXT, LONGEST_NAME = 40, 200
NAMED_BY_SWEEP = ("run_directory",)
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+-]+")


@dataclass(frozen=True)
class Choice:
    """The values that a sweep gives to a key.

    Attributes:
        key: of the run file.
        values: at least one, all different.
    """

    key: Key
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Combination:
    """One value for each key of a sweep.

    Attributes:
        name: of the run, which says what differs between the runs.
        differing: key, as short as it is clear, -> text of its value, of the keys that differ.
        overrides: `key=value` in TOML, for all keys.
    """

    name: str
    differing: Mapping[str, str]
    overrides: tuple[str, ...]


def read_choices(lines: Sequence[str]) -> list[Choice]:
    """Read `key=[value, ...]`, one for each key.

    Raises:
        ConfigError: with a problem for each line that is wrong.
    """
    problems: list[Problem] = []
    choices: dict[Key, Choice] = {}
    for line in lines:
        for table in read_overrides([line], problems):
            found = list(leaves(table))
            key, values = found[0][0] if len(found) == 1 else tuple(table)[:1], [it.value for _, it in found]
            problem = Problem("given twice", "write one list") if key in choices else _problem(key, values)
            if problem is None:
                choices[key] = Choice(key, tuple(values[0]))
            else:
                problems.append(problem.concerning(f"command line: {dotted(key)}"))
    if problems:
        raise ConfigError(problems)
    if not choices:
        raise ConfigError("a sweep needs a key with a list of values", "add one, as in 'seed=[0,1]'")
    return list(choices.values())


def _problem(key: Key, values: Sequence[Any]) -> Problem | None:
    """Return what is wrong with the value of a key; None if it is a list of different values."""
    if dotted(key) in NAMED_BY_SWEEP:
        return Problem("the sweep names the run directories", "pass --directory for the one above them")
    if len(values) != 1 or values[0] is None:
        return Problem("expected a list of values", "write one, as in 'seed=[0,1]'")
    (value,) = values
    if not isinstance(value, list):
        same = shortened(f"{dotted(key)}=[{toml_text(value)}]")
        return Problem("a single value and not a list", f"write '{same}' for the same value in all runs")
    if not value:
        return Problem("an empty list", "write the values to try into it")
    twice = [text for text, number in Counter(map(toml_text, value)).items() if number > 1]
    return Problem(f"{shortened(twice[0])} is in the list twice", "write it once") if twice else None


def combinations(choices: Sequence[Choice]) -> list[Combination]:
    """Return the product of the choices; the values of the last key change fastest.

    Raises:
        ConfigError: if these are too many, or too many keys for a name.
    """
    number = math.prod(len(choice.values) for choice in choices)
    if number > MOST_RUNS:
        raise ConfigError(f"these lists make {number:,} runs, and a sweep has at most {MOST_RUNS:,}", "shorten them")
    # The only run of a sweep needs a name too.
    named = [choice for choice in choices if len(choice.values) > 1] or choices
    names = dict(zip((choice.key for choice in named), _short_names([choice.key for choice in named]), strict=True))
    texts = {choice.key: _short_texts(choice.values) for choice in choices}
    found = []
    for places in product(*(range(len(choice.values)) for choice in choices)):
        chosen = list(zip(choices, places, strict=True))
        differing = {names[it.key]: texts[it.key][place] for it, place in chosen if it.key in names}
        name = ",".join(f"{key}={text}" for key, text in differing.items())
        if len(name) > LONGEST_NAME:
            raise ConfigError(f"the name of a run would have {len(name)} characters", "choose fewer keys at once")
        overrides = tuple(f"{dotted(it.key)}={toml_text(it.values[place])}" for it, place in chosen)
        found.append(Combination(name, differing, overrides))
    return found


def _short_names(keys: Sequence[Key]) -> Iterator[str]:
    """Yield the last part of each key; the whole key where two have the same last part."""
    last = Counter(key[-1] for key in keys)
    for key in keys:
        text = key[-1] if last[key[-1]] == 1 else ".".join(key)
        yield NOT_IN_NAMES.sub("-", text)


def _short_texts(values: Iterable[Any]) -> list[str]:
    """Return a text for each value that may be part of a file name, all different."""
    texts = [NOT_IN_NAMES.sub("-", _text(value)).strip("-")[:LONGEST_TEXT] or "empty" for value in values]
    if len(set(texts)) == len(texts):
        return texts
    return [f"{text}-{place}" for place, text in enumerate(texts, start=1)]


def _text(value: Any) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return value if isinstance(value, str) else toml_text(value)


def toml_text(value: Any) -> str:
    """Return a value as TOML in one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml_text(below)}" for key, below in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_text, value))}]"
    # JSON has no infinity and no dates.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
