"""Parsing of TOML or JSON to values that TOML can have, whatever the text holds."""

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from meshtrain.config.tables import Key
from meshtrain.errors import ConfigError, Problem

DEEPEST = 30
_BITS_64 = range(-(2**63), 2**63)
_TOO_DEEP = Problem(f"tables and lists are nested more than {DEEPEST} deep", "write fewer levels")
_ENDLESS_NUMBER = re.compile(r"[0-9][0-9_]{4300,}")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values of a TOML text.

    Raises:
        TOMLDecodeError: if the text is not TOML.
        ConfigError: if Python cannot read its contents.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise ConfigError(_reason(text, error)) from None


def parse_json(text: str) -> dict[str, Any]:
    """Return the values of a JSON text.

    Raises:
        JSONDecodeError: if the text is not JSON.
        ConfigError: if Python cannot read its contents, or it holds no object.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise ConfigError(_reason(text, error)) from None
    if not isinstance(values, dict):
        raise ConfigError(f"holds a {type(values).__name__} and not an object", "write {...}")
    return values


def _reason(text: str, error: RecursionError | ValueError) -> Problem:
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    number = _ENDLESS_NUMBER.search(text)
    line = f"line {text[: number.start()].count(chr(10)) + 1}: " if number else ""
    return Problem(f"{line}a number has thousands of digits", "integers have at most 64 bits")


def unusable_values(value: Any, key: Key = ()) -> Iterator[tuple[Key, Problem]]:
    """Yield the keys whose values no configuration can hold, each with what is wrong.

    Args:
        value: of the key: a table, a list or a single value.
        key: position of the value in the file.
    """
    if len(key) > DEEPEST:
        yield key[:1], _TOO_DEEP
    elif isinstance(value, dict):
        for name, below in value.items():
            if not _is_text(name):
                yield key, Problem(f"the key {name!r} is not UTF-8 text", "fix it")
            else:
                yield from unusable_values(below, (*key, name))
    elif isinstance(value, list):
        if _depth(value) + len(key) > DEEPEST:
            yield key, _TOO_DEEP
            return
        for entry in _entries(value):
            yield from _unusable(entry, key)
    else:
        yield from _unusable(value, key)


def _unusable(value: Any, key: Key) -> Iterator[tuple[Key, Problem]]:
    if isinstance(value, dict):
        yield from ((key, problem) for _, problem in unusable_values(value))
    elif isinstance(value, int) and value not in _BITS_64:
        found = f"a whole number of {value.bit_length():,} bits, and TOML has at most 64"
        yield key, Problem(found, "use a smaller one")
    elif isinstance(value, str) and not _is_text(value):
        yield key, Problem(f"{value[:40]!r} is not UTF-8 text", "fix it")


def _depth(value: Any) -> int:
    """Return the depth of nested lists, level by level: recursion could exceed Python's limit."""
    depth, level = 0, [value]
    while level:
        depth, level = depth + 1, [entry for part in level if isinstance(part, list) for entry in part]
    return depth


def _entries(value: list[Any]) -> Iterator[Any]:
    for entry in value:
        if isinstance(entry, list):
            yield from _entries(entry)
        else:
            yield entry


def _is_text(text: str) -> bool:
    """Return whether a text can be written as UTF-8.

    A command line, or an escape in JSON, may hold half a character.
    """
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
