"""Records: chunks of source files parsed into texts, and what is wrong with those that are none."""

import json
from collections.abc import Iterator
from typing import NamedTuple

from meshtrain.data.chunks import Chunk, not_utf8
from meshtrain.errors import name_some

OTHER_TYPES = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


class Text(NamedTuple):
    """A document, or a piece of one that is too long to be held in memory."""

    text: str
    ends_document: bool
    place: str
    """The file, and the line or row: for messages."""


class Problem(NamedTuple):
    """A record that is no text."""

    message: str
    """With its place."""
    is_damage: bool
    """Whether what follows in the file is lost as well."""


def parse(chunk: Chunk, text_key: str) -> Iterator[Text | Problem]:
    """Yield what a chunk holds, in order. A Python file that is not UTF-8 is nothing; it may say so, and be right."""
    if chunk.kind == "lines":
        yield from _json_lines(chunk, text_key)
    elif chunk.kind in ("text", "python"):
        try:
            yield Text(chunk.data.decode(), chunk.ends_document, chunk.place)
        except UnicodeDecodeError as error:
            if chunk.kind == "text":
                yield Problem(f"{chunk.place}: {not_utf8(error)}", is_damage=False)
    elif chunk.kind in ("problem", "damage"):
        yield Problem(chunk.data.decode(), is_damage=chunk.kind == "damage")


def _json_lines(chunk: Chunk, text_key: str) -> Iterator[Text | Problem]:
    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
        if not line or line.isspace():
            continue
        place = f"{chunk.place}, line {number}"
        try:
            yield Text(_text_of(line, text_key), ends_document=True, place=place)
        except (ValueError, RecursionError) as error:
            yield Problem(f"{place}: {error}", is_damage=False)


def _text_of(line: bytes, text_key: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (column {error.colno}: {error.msg})") from None
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
    if not isinstance(record, dict):
        raise ValueError(f"{_type_name(record)} where an object with the key {json.dumps(text_key)} is expected")
    if text_key not in record:
        raise ValueError(
            f'no key "{text_key}" (data.text_key); the keys are {name_some([json.dumps(key) for key in record])}'
        )
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f'the key "{text_key}" (data.text_key) holds {_type_name(text)} and not text')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f'the text of "{text_key}" holds half a surrogate pair, which stands for no character'
        ) from None
    return text


def _type_name(value: object) -> str:
    return "null" if value is None else "text" if isinstance(value, str) else OTHER_TYPES[type(value)]
