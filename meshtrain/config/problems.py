"""Messages about errors in a file or on the command line: source, what was found, what to do."""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches

from pydantic import ValidationError

from meshtrain.config.schema import Schema, choices, expectation, keys_of, subschema
from meshtrain.config.tables import Key, Setting, SettingSource, Table, leaves, walk
from meshtrain.errors import printable

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
LONGEST_VALUE, LONGEST_NAME = 60, 200


def dotted(key: Key) -> str:
    """Return a key as TOML writes it."""
    return ".".join(name if BARE_KEY.fullmatch(name) and len(name) <= LONGEST_NAME else _quoted(name) for name in key)


def _quoted(name: str) -> str:
    return f'"{shortened(printable(name), LONGEST_NAME)}"'


def problem(source: SettingSource, key: Key, message: str) -> str:
    """Return one line: the file that set the key, the key as in that file, and what is wrong."""
    own_key = key[len(source.inside) :] if is_inside(key, source.inside) else key
    return f"{source.label}: {dotted(own_key)}: {message}" if own_key else f"{source.label}: {message}"


def is_inside(key: Key, table: Key) -> bool:
    """Return whether a key is inside a table."""
    return key[: len(table)] == table


def syntax_problem(error: tomllib.TOMLDecodeError) -> str:
    """Return the message of a syntax error with the position before the reason."""
    reason, is_there, place = str(error).removesuffix(")").rpartition(" (at ")
    return f"{place}: {reason[:1].lower()}{reason[1:]}" if is_there else str(error)


def nearest(word: str, options: Iterable[str]) -> str | None:
    """Return the option that is most similar to a word, or None."""
    by_lower_case = {option.lower(): option for option in options}
    # 0.5 in place of difflib's 0.6, because the usual keys of this field (pp, tp) are short.
    matches = get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.5)
    return by_lower_case[matches[0]] if matches else None


def did_you_mean(word: str, options: Sequence[str], others: str, *, ending: str = "") -> str:
    """Return the end of a message about a wrong word: the nearest option, or else all of them.

    Args:
        word: the wrong word.
        options: the valid ones.
        others: description of all options.
        ending: common ending of all options; it would make any two look similar.
    """
    if near := nearest(word, options):
        return f"; did you mean {near + ending!r}?"
    return f"; {others}: {', '.join(option + ending for option in options)}" if options else ""


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

    def explain(self, error: ValidationError) -> list[str]:
        """Return one line for each wrong key."""
        lines: dict[Key, str] = {}
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
                lines[key] = self._contradiction(key, node, str(detail["ctx"]["error"]))
            elif (part := subschema(self._schema, key)) is None:
                lines[key] = self._unknown_key(key, node)
                misspelt.add((*key[:-1], nearest(key[-1], self._names_beside(key)) or ""))
            else:
                lines[key] = problem(self._source(node), key, _unexpected(part, node))
        if self._is_whole:
            lines |= {key: self._missing(key) for key in missing if key not in misspelt}
        return list(lines.values())

    def explain_removals(self) -> list[str]:
        """Return one line for each removed key that does not exist: pydantic never sees it."""
        removed = [(key, node) for key, node in leaves(self._table) if node.value is None]
        return [self._unknown_key(key, node) for key, node in removed if subschema(self._schema, key) is None]

    def _missing(self, key: Key) -> str:
        part = subschema(self._schema, key)
        assert part is not None
        return problem(self._asked, key, f"missing; expected {expectation(part)}")

    def _unknown_key(self, key: Key, node: Table | Setting) -> str:
        source = self._source(node)
        namesakes = [
            other for other in keys_of(self._schema) if other[-1] == key[-1] and is_inside(other, source.inside)
        ]
        if namesakes:
            places = " or ".join(repr(dotted(other[len(source.inside) :])) for other in namesakes)
            return problem(source, key, f"unknown key; did you mean {places}?")
        hint = did_you_mean(key[-1], self._names_beside(key), "the keys here are")
        return problem(source, key, f"unknown key{hint}")

    def _names_beside(self, key: Key) -> list[str]:
        above = subschema(self._schema, key[:-1])
        return list(above.get("properties", ())) if above else []

    def _contradiction(self, key: Key, node: Table | Setting, message: str) -> str:
        """Return a message for the sources of the keys that it names in backticks."""
        if isinstance(node, Setting):
            return problem(node.source, key, message)
        named = [below for name, below in node.items() if f"`{name}`" in message]
        sources = list(dict.fromkeys(source for below in named for source in _sources(below))) or [self._asked]
        together = replace(sources[0], label=", ".join(source.label for source in sources))
        return problem(together, key, message)

    def _source(self, node: Table | Setting) -> SettingSource:
        return next(_sources(node), self._asked)


def _sources(node: Table | Setting) -> Iterator[SettingSource]:
    if isinstance(node, Setting):
        yield node.source
    else:
        yield from (setting.source for _, setting in leaves(node))


def _unexpected(part: Schema, node: Table | Setting) -> str:
    value = None if isinstance(node, dict) else node.value
    near = nearest(value, choices(part)) if isinstance(value, str) else None
    hint = f"; did you mean {near!r}?" if near else ""
    return f"expected {expectation(part, value)}, found {_found(node)}{hint}"


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
