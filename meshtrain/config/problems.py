"""Messages about errors in a file or on the command line: source, what was found, what to do."""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from meshtrain.config.schema import Schema, choices, expectation, keys_of, subschema
from meshtrain.config.settings import REMEDY
from meshtrain.config.tables import Key, Setting, SettingSource, Table, leaves, walk
from meshtrain.errors import ConfigError, Problem, printable

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
LONGEST_VALUE, LONGEST_NAME = 60, 200
REPLACED: dict[Key, str] = {
    ("logging", "tensorboard"): 'write logging.trackers = ["tensorboard"], or [] for no tracker',
}
"""Keys that files had before -> what to write now."""


def dotted(key: Key) -> str:
    """Return a key as TOML writes it."""
    return ".".join(name if BARE_KEY.fullmatch(name) and len(name) <= LONGEST_NAME else _quoted(name) for name in key)


def _quoted(name: str) -> str:
    return f'"{shortened(printable(name), LONGEST_NAME)}"'


def problem(source: SettingSource, key: Key, found: str, advice: str = "") -> Problem:
    """Return a problem with a key that this source has set."""
    return Problem(found, advice, place(source, key))


def place(source: SettingSource, key: Key) -> str:
    """Return the file that set the key, and the key as in that file."""
    own_key = key[len(source.inside) :] if is_inside(key, source.inside) else key
    return f"{source.label}: {dotted(own_key)}" if own_key else source.label


def is_inside(key: Key, table: Key) -> bool:
    """Return whether a key is inside a table."""
    return key[: len(table)] == table


def syntax_problem(error: tomllib.TOMLDecodeError) -> str:
    """Return the message of a syntax error with the position before the reason."""
    reason, is_there, position = str(error).removesuffix(")").rpartition(" (at ")
    return f"{position}: {reason[:1].lower()}{reason[1:]}" if is_there else str(error)


def nearest(word: str, options: Iterable[str]) -> str | None:
    """Return the option that is most similar to a word, or None."""
    by_lower_case = {option.lower(): option for option in options}
    # 0.5 in place of difflib's 0.6, because the usual keys of this field (pp, tp) are short.
    matches = get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.5)
    return by_lower_case[matches[0]] if matches else None


def did_you_mean(word: str, options: Sequence[str], others: str, *, ending: str = "") -> str:
    """Return the advice about a wrong word: the nearest option, or else all of them.

    Args:
        word: the wrong word.
        options: the valid ones.
        others: description of all options.
        ending: common ending of all options; it would make any two look similar.
    """
    if near := nearest(word, options):
        return f"did you mean {near + ending!r}?"
    return f"{others}: {', '.join(option + ending for option in options)}" if options else ""


class Explainer:
    """Turns the errors that pydantic finds in settings into plain messages.

    Args:
        table: the settings.
        schema: of the file, for what was expected.
        asked: the file that the user named; it is named for errors in settings without a source.
        is_whole: whether every file could be read; otherwise no key can be called missing.
    """

    def __init__(self, table: Table, schema: Schema, *, asked: SettingSource, is_whole: bool) -> None:
        self._table = table
        self._schema = schema
        self._asked = asked
        self._is_whole = is_whole

    def explain(self, error: ValidationError) -> list[Problem]:
        """Return one problem for each wrong key."""
        problems: dict[Key, Problem] = {}
        missing: list[Key] = []
        misspelt: set[Key] = set()
        for detail in error.errors(include_url=False):
            location = tuple(str(name) for name in detail["loc"])
            # For a value of several forms pydantic reports several errors, each below the name of a
            # form that is not in the file.
            *_, (key, node) = walk(self._table, location)
            if detail["type"] == "missing":
                missing.append(location)
            elif detail["type"] == "value_error":
                problems[key] = self._contradiction(key, node, detail["ctx"]["error"])
            elif (part := subschema(self._schema, key)) is None:
                problems[key] = self._unknown_key(key, node)
                misspelt.add((*key[:-1], nearest(key[-1], self._names_beside(key)) or ""))
            else:
                problems[key] = self._unexpected(key, node, part)
        if self._is_whole:
            problems |= {key: self._missing(key) for key in missing if key not in misspelt}
        return list(problems.values())

    def explain_removals(self) -> list[Problem]:
        """Return one problem for each removed key that does not exist: pydantic never sees it."""
        removed = [(key, node) for key, node in leaves(self._table) if node.value is None]
        return [self._unknown_key(key, node) for key, node in removed if subschema(self._schema, key) is None]

    def _missing(self, key: Key) -> Problem:
        part = subschema(self._schema, key)
        assert part is not None
        remedy = f"; {part[REMEDY]}" if REMEDY in part else ""
        return problem(self._asked, key, "missing", f"expected {expectation(part)}{remedy}")

    def _unknown_key(self, key: Key, node: Table | Setting) -> Problem:
        source = self._source(node)
        if key in REPLACED:
            return problem(source, key, "this key has been replaced", REPLACED[key])
        namesakes = [
            other for other in keys_of(self._schema) if other[-1] == key[-1] and is_inside(other, source.inside)
        ]
        if namesakes:
            places = " or ".join(repr(dotted(other[len(source.inside) :])) for other in namesakes)
            return problem(source, key, "unknown key", f"did you mean {places}?")
        return problem(source, key, "unknown key", did_you_mean(key[-1], self._names_beside(key), "the keys here are"))

    def _names_beside(self, key: Key) -> list[str]:
        above = subschema(self._schema, key[:-1])
        return list(above.get("properties", ())) if above else []

    def _unexpected(self, key: Key, node: Table | Setting, part: Schema) -> Problem:
        value = None if isinstance(node, dict) else node.value
        near = _nearest_choice(value, part)
        hint = f"did you mean {near!r}?" if near else ""
        found = f"expected {expectation(part, value)}, found {_found(node)}"
        return problem(self._source(node), key, found, hint)

    def _contradiction(self, key: Key, node: Table | Setting, error: ConfigError) -> Problem:
        """Return the problem for the sources of the keys that it names in backticks."""
        (refused,) = error.problems
        if isinstance(node, Setting):
            return refused.concerning(place(node.source, key))
        named = [below for name, below in node.items() if f"`{name}`" in str(refused)]
        sources = list(dict.fromkeys(source for below in named for source in _sources(below))) or [self._asked]
        together = replace(sources[0], label=", ".join(source.label for source in sources))
        return refused.concerning(place(together, key))

    def _source(self, node: Table | Setting) -> SettingSource:
        return next(_sources(node), self._asked)


def _sources(node: Table | Setting) -> Iterator[SettingSource]:
    if isinstance(node, Setting):
        yield node.source
    else:
        yield from (setting.source for _, setting in leaves(node))


def _nearest_choice(value: Any, part: Schema) -> str | None:
    """Return the choice that is most similar to a value, or to the first wrong entry of a list."""
    entries, known = (value, choices(part.get("items", {}))) if isinstance(value, list) else ([value], choices(part))
    wrong = (entry for entry in entries if isinstance(entry, str) and entry not in known)
    return next((nearest(entry, known) for entry in wrong), None)


def _found(node: Table | Setting) -> str:
    if isinstance(node, dict):
        return "a table"
    if isinstance(node.value, str):
        return f"the string {shortened(repr(node.value))}"
    if isinstance(node.value, float) and not math.isfinite(node.value):
        return repr(node.value)
    return shortened(printable(json.dumps(node.value, default=str, ensure_ascii=False)))


def shortened(text: str, longest: int = LONGEST_VALUE) -> str:
    """Return a text, cut if it is too long for a line."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
