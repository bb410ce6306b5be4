"""Records: chunks of source files are parsed into texts, and into problems for bad records."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from meshtrain.data.text.chunks import Chunk, not_utf8
from meshtrain.data.text.images import check_no_images, type_name
from meshtrain.errors import name_some

BEGINNINGS = (b"[", b"{", b"[{")
"""The first line of a JSON file that does not hold one record per line."""

LARGEST_WEIGHT = 1_000_000


class Text(NamedTuple):
    """A document, or a piece of one that is too long to be held in memory."""

    text: str
    ends_document: bool
    location: str
    """The file, and the line or row: for messages."""


class BadRecord(NamedTuple):
    """A record that cannot be used."""

    message: str
    """Includes the location."""
    is_damage: bool
    """Whether the rest of the file is lost too."""


class Fields(NamedTuple):
    """The fields of a record that is not a single text."""

    values: dict[str, Any]
    location: str
    """The file, and the line or row: for messages."""


def parse(chunk: Chunk, text_key: str, *, setting: str) -> Iterator[Text | BadRecord]:
    """Yield the texts of a chunk, in order.

    A Python file that is not UTF-8 yields nothing: Python allows other encodings.

    Args:
        text_key: the key of the text in a record.
        setting: how the user names that key, for messages.
    """
    if chunk.kind == "lines":
        for location, line in _lines(chunk):
            try:
                record = _load_fields(line, {text_key: setting})
                # Beside a text, a string is often the address of a picture on the same page.
                check_no_images(record, but=(text_key,), strings=False)
                text = checked_text(record[text_key], text_key, setting)
                yield Text(text, ends_document=True, location=location)
            except (ValueError, RecursionError) as error:
                yield BadRecord(f"{location}: {error}", is_damage=False)
    elif chunk.kind in ("text", "python"):
        try:
            yield Text(chunk.data.decode(), chunk.ends_document, chunk.location)
        except UnicodeDecodeError as error:
            if chunk.kind == "text":
                yield BadRecord(f"{chunk.location}: {not_utf8(error)}", is_damage=False)
    elif chunk.kind in ("problem", "damage"):
        yield BadRecord(chunk.data.decode(), is_damage=chunk.kind == "damage")


def parse_fields(chunk: Chunk, keys: Mapping[str, str]) -> Iterator[Fields | BadRecord]:
    """Yield the records of a chunk, in order.

    Args:
        keys: key that each record must have -> setting that names it.
    """
    if chunk.kind == "lines":
        for location, line in _lines(chunk):
            try:
                record = _load_fields(line, keys)
                check_no_images(record, but=keys)
                yield Fields(record, location)
            except (ValueError, RecursionError) as error:
                yield BadRecord(f"{location}: {error}", is_damage=False)
    elif chunk.kind in ("problem", "damage"):
        yield BadRecord(chunk.data.decode(), is_damage=chunk.kind == "damage")
    elif chunk.data:
        problem = f"{chunk.location}: a text, where JSON lines or a table with {name_some([*keys])} are expected"
        yield BadRecord(problem, is_damage=False)


def _lines(chunk: Chunk) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
        if line and not line.isspace():
            # A line made from a table row is a chunk of its own, whose location names the row.
            yield (f"{chunk.location}, line {number}" if chunk.first_line else chunk.location), line


def _load_fields(line: bytes, keys: Mapping[str, str]) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        if line.strip() in BEGINNINGS:
            raise ValueError("only the beginning of a record, where every line must hold a complete one") from None
        raise ValueError(f"not JSON (column {error.colno}: {error.msg})") from None
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
    except ValueError:
        # Python refuses integers of more than 4,300 digits. Only texts are used, so a float is good
        # enough.
        record = json.loads(line, parse_int=float)
    if not isinstance(record, dict):
        wanted = f"key{'s' * (len(keys) > 1)} {name_some([*map(json.dumps, keys)])}"
        raise ValueError(f"{type_name(record)} where an object with the {wanted} is expected")
    for key, setting in keys.items():
        if key not in record:
            raise ValueError(f'no key "{key}" ({setting}); the keys are {name_some([*map(json.dumps, record)])}')
    return record


def checked_text(text: object, key: str, setting: str) -> str:
    """Return a text that can be encoded.

    Args:
        key: the key of the record that holds it.
        setting: how the user names that key.

    Raises:
        ValueError: if `text` is not such a text.
    """
    if not isinstance(text, str):
        raise ValueError(f'the key "{key}" ({setting}) holds {type_name(text)} and not text')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f'the text of "{key}" holds half a surrogate pair, which stands for no character') from None
    return text


def checked_weight(weight: object, key: str, setting: str) -> float:
    """Return a weight that a loss can be multiplied by; the arguments are those of `checked_text`.

    Raises:
        ValueError: if it is none.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f'the key "{key}" ({setting}) holds {type_name(weight)} and not a number')
    if not 0 <= weight <= LARGEST_WEIGHT:
        raise ValueError(f'the key "{key}" ({setting}) holds {weight}, and weights are from 0 to {LARGEST_WEIGHT:,}')
    return float(weight)
