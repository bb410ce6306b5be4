"""Records: chunks of source files parsed into texts, and what is wrong with those that are none."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from meshtrain.data.text.chunks import Chunk, not_utf8
from meshtrain.data.text.corpus import TEXT_KEY
from meshtrain.errors import name_some

BEGINNINGS = (b"[", b"{", b"[{")
"""With which JSON begins that is not of lines."""

OTHER_TYPES = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


class Text(NamedTuple):
    """A document, or a piece of one that is too long to be held in memory."""

    text: str
    ends_document: bool
    place: str
    """The file, and the line or row: for messages."""


class BadRecord(NamedTuple):
    """A record that is no text."""

    message: str
    """With its place."""
    is_damage: bool
    """Whether what follows in the file is lost as well."""


class Fields(NamedTuple):
    """A record that is no single text: its fields."""

    values: dict[str, Any]
    place: str
    """The file, and the line or row: for messages."""


def parse(chunk: Chunk, text_key: str) -> Iterator[Text | BadRecord]:
    """Yield what a chunk holds, in order. A Python file that is not UTF-8 is nothing; it may say so, and be right."""
    if chunk.kind == "lines":
        for place, line in _lines(chunk):
            try:
                yield Text(_text_of(line, text_key), ends_document=True, place=place)
            except (ValueError, RecursionError) as error:
                yield BadRecord(f"{place}: {error}", is_damage=False)
    elif chunk.kind in ("text", "python"):
        try:
            yield Text(chunk.data.decode(), chunk.ends_document, chunk.place)
        except UnicodeDecodeError as error:
            if chunk.kind == "text":
                yield BadRecord(f"{chunk.place}: {not_utf8(error)}", is_damage=False)
    elif chunk.kind in ("problem", "damage"):
        yield BadRecord(chunk.data.decode(), is_damage=chunk.kind == "damage")


def parse_fields(chunk: Chunk, keys: Mapping[str, str]) -> Iterator[Fields | BadRecord]:
    """Yield the records that a chunk holds, in order.

    Args:
        keys: that each must have -> the key of a run file that names it.
    """
    if chunk.kind == "lines":
        for place, line in _lines(chunk):
            try:
                yield Fields(_fields_of(line, keys), place)
            except (ValueError, RecursionError) as error:
                yield BadRecord(f"{place}: {error}", is_damage=False)
    elif chunk.kind in ("problem", "damage"):
        yield BadRecord(chunk.data.decode(), is_damage=chunk.kind == "damage")
    elif chunk.data:
        problem = f"{chunk.place}: a text, where JSON lines or a table with {name_some([*keys])} are expected"
        yield BadRecord(problem, is_damage=False)


def _lines(chunk: Chunk) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
        if line and not line.isspace():
            # The lines that stand for the rows of a table are one to a chunk, which says its place.
            yield (f"{chunk.place}, line {number}" if chunk.first_line else chunk.place), line


def _fields_of(line: bytes, keys: Mapping[str, str]) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        if line.strip() in BEGINNINGS:
            raise ValueError("only the beginning of a record, where every line must hold a whole one") from None
        raise ValueError(f"not JSON (column {error.colno}: {error.msg})") from None
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
    except ValueError:
        # Python makes no whole number of more than 4,300 digits. Only texts are read, so an approximation will do.
        record = json.loads(line, parse_int=float)
    if not isinstance(record, dict):
        wanted = f"key{'s' * (len(keys) > 1)} {name_some([*map(json.dumps, keys)])}"
        raise ValueError(f"{type_name(record)} where an object with the {wanted} is expected")
    for key, said_by in keys.items():
        if key not in record:
            raise ValueError(f'no key "{key}" ({said_by}); the keys are {name_some([*map(json.dumps, record)])}')
    return record


def _text_of(line: bytes, text_key: str) -> str:
    text = _fields_of(line, {text_key: TEXT_KEY})[text_key]
    return checked_text(text, text_key, TEXT_KEY)


def checked_text(text: object, key: str, said_by: str) -> str:
    """Return a text that can be encoded.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(text, str):
        raise ValueError(f'the key "{key}" ({said_by}) holds {type_name(text)} and not text')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f'the text of "{key}" holds half a surrogate pair, which stands for no character') from None
    return text


def type_name(value: object) -> str:
    """Return in a word what JSON calls a value."""
    return "null" if value is None else "text" if isinstance(value, str) else OTHER_TYPES[type(value)]
