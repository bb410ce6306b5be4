"""The reference of run, plan and corpus files, from the docstrings of the fields."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from meshtrain.config.schema import Schema, described_schema, expectation, resolved

Kind = Literal["run", "plan", "corpus"]
REPEATED = {"plan": "[Plan file](plan.md)"}
"""Tables of a run file that have a page of their own."""


def page(kind: Kind) -> str:
    """Return the reference of a kind of file in Markdown: a section per table, an entry per key."""
    schema = described_schema(kind)
    return "\n\n".join(_table(schema, schema, above=""))


def _table(schema: Schema, table: Schema, above: str) -> Iterator[str]:
    """Yield the entries of a table, then the tables inside it."""
    inner = []
    for name, field in table["properties"].items():
        key = f"{above}{name}"
        part = resolved(schema, field)
        below = _rows_of_table(part)
        if below is not None and key not in REPEATED:
            inner.append((key, part))
        elif _is_named_tables(part):
            yield _entry(key, part, field, required=name in _required(table))
            inner.append((f"{key}.NAME", resolved(schema, part["additionalProperties"])))
        else:
            yield _entry(key, part, field, required=name in _required(table))
    for key, part in inner:
        yield f"## `[{key}]` {{ #{key} }}\n\n{part['description']}"
        yield from _table(schema, part, above=f"{key}.")


def _required(table: Schema) -> list[str]:
    # A run file may leave out what the file that it extends says.
    forms = [table, *table.get("anyOf", ())]
    return [name for form in forms for name in form.get("required", ()) if name != "extends"]


def _rows_of_table(part: Schema) -> Schema | None:
    return part.get("properties")


def _is_named_tables(part: Schema) -> bool:
    return isinstance(part.get("additionalProperties"), dict) and "$ref" in part["additionalProperties"]


def _entry(key: str, part: Schema, field: Schema, *, required: bool) -> str:
    facts = [f"Type: {expected(part)}", "**Required**" if required else f"Default: {_default(field)}"]
    line = " · ".join(facts)
    meaning = field.get("description") or part["description"]
    if key in REPEATED:
        line, meaning = "Type: a name or a table", f"{meaning} Its keys: {REPEATED[key]}."
    label = key.rpartition(".")[2]
    return f'### `{key}` {{ #{key} data-toc-label="{label}" }}\n\n<div class="facts" markdown>{line}</div>\n\n{meaning}'


def expected(part: Schema) -> str:
    """Return in Markdown what a value must be: its type, limits and allowed values."""
    words = [_code(word) for form in part.get("anyOf", [part]) for word in form.get("enum", ())]
    others = [form for form in part.get("anyOf", [part]) if "enum" not in form and form.get("type") != "null"]
    phrases = [_table_words(form) or _with_limits(expectation(form)) for form in others]
    return ", or ".join([", ".join(words)] * bool(words) + phrases)


def _with_limits(phrase: str) -> str:
    return re.sub(r"((?:from|above) \S+) below", r"\1 and below", phrase)


def _table_words(form: Schema) -> str | None:
    inside = form.get("additionalProperties")
    if form.get("type") != "object" or inside in (None, False):
        return None
    if inside is True:
        return "a table"
    if "$ref" in inside:
        return "tables, each under a name of your choice"
    return f"a table, each value {'one of ' if 'enum' in inside else ''}{expected(inside)}"


def _default(field: Schema) -> str:
    if "default" not in field:
        return "left out"
    value = field["default"]
    return "left out" if value is None else _code(value)


def _code(value: Any) -> str:
    if isinstance(value, str) and value.startswith("/") and value.endswith(".cache/meshtrain"):
        value = "~/.cache/meshtrain"
    return f"`{json.dumps(value)}`"
