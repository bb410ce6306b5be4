"""The JSON schemas of run, plan, corpus and machine files, for editors and for error messages."""

import copy
import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from meshtrain.config.corpus import CorpusConfig
from meshtrain.config.machine import MachineConfig
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import RunConfig
from meshtrain.config.settings import Settings, field_docstrings
from meshtrain.config.tables import Key

Schema = dict[str, Any]
Kind = Literal["run", "plan", "corpus", "machine"]
FAR = 10**6
DIALECT = "https://json-schema.org/draft/2020-12/schema"
NAMES = {"integer": "a whole number", "number": "a number", "string": "a string", "boolean": "true or false"}


@cache
def json_schema(kind: Kind) -> Schema:
    """Return the JSON schema (draft 2020-12) of a file as it is written.

    It has `extends`, and `plan` as a name. It has no descriptions of keys: every start of a run
    needs the schema, but only editors need the descriptions (`described_schema`).

    Args:
        kind: which of the files. The result is cached and shared, and must not be changed.
    """
    if kind == "plan":
        plan = ParallelPlan.model_json_schema()
        plan["properties"]["extends"] = _extends("The plan to start from: a shipped one, or a path to a .toml file")
        return {"$schema": DIALECT, **plan}
    if kind == "corpus":
        corpus = CorpusConfig.model_json_schema()
        corpus["properties"]["extends"] = _extends("The corpus file to start from")
        return {"$schema": DIALECT, **_required_or_extends(corpus)}
    if kind == "machine":
        return {"$schema": DIALECT, **MachineConfig.model_json_schema()}
    run = RunConfig.model_json_schema()
    run["properties"]["extends"] = _extends("The run file to start from")
    plan = run["$defs"]["ParallelPlan"]
    plan["properties"]["extends"] = _extends("The plan to start from: a shipped one, or a path to a .toml file")
    table = {"$ref": run["properties"]["plan"].pop("$ref")}
    run["properties"]["plan"]["anyOf"] = [{"type": "string"}, table]
    return {"$schema": DIALECT, **_required_or_extends(run)}


def described_schema(kind: Kind) -> Schema:
    """Return the JSON schema of a file with descriptions: the docstrings under the fields."""
    schema = copy.deepcopy(json_schema(kind))
    kinds = {settings_type.__name__: settings_type for settings_type in _derived_from(Settings)}
    for table in (schema, *schema.get("$defs", {}).values()):
        for name, docstring in field_docstrings(kinds[table["title"]]).items():
            table["properties"][name].setdefault("description", docstring)
    return schema


def _derived_from(settings_type: type[Settings]) -> Iterator[type[Settings]]:
    for kind in settings_type.__subclasses__():
        yield kind
        yield from _derived_from(kind)


def _required_or_extends(file: Schema) -> Schema:
    # A required key may be in the file that this one extends.
    file["anyOf"] = [{"required": ["extends"]}, {"required": file.pop("required")}]
    return file


def _extends(description: str) -> Schema:
    return {"type": "string", "description": f"{description}; keys of this file win."}


def subschema(schema: Schema, key: Key) -> Schema | None:
    """Return the part of a schema for a key: empty if anything is allowed, None if unknown."""
    part = resolved(schema, schema)
    for name in key:
        if not part:
            return part
        below = part.get("properties", {}).get(name, part.get("additionalProperties", False))
        if below is False:
            return None
        part = {} if below is True else resolved(schema, below)
    return part


def resolved(schema: Schema, part: Schema) -> Schema:
    """Return a part with its reference resolved.

    Of a choice of forms, the table is resolved, if there is one, and the choices stay.
    """
    if "$ref" in part:
        return {**part, **schema["$defs"][part["$ref"].rpartition("/")[2]]}
    tables = [form for form in part.get("anyOf", ()) if "$ref" in form]
    return {**resolved(schema, tables[0]), **part} if tables else part


def keys_of(schema: Schema, part: Schema | None = None, above: Key = ()) -> list[Key]:
    """Return every key that the schema knows, the tables included."""
    table = resolved(schema, schema if part is None else part)
    keys = []
    for name, below in table.get("properties", {}).items():
        keys += [(*above, name), *keys_of(schema, below, (*above, name))]
    return keys


def choices(part: Schema) -> list[str]:
    """Return the strings that a value may be, if it is a choice of strings."""
    forms = part.get("anyOf", [part])
    return [word for form in forms for word in form.get("enum", ()) if isinstance(word, str)]


def expectation(part: Schema, found: Any = None) -> str:
    """Return a description of what a value must be.

    Args:
        part: of the schema, for the value.
        found: the value, if there is one. Very large limits are mentioned only if the value is
            beyond them.
    """
    *others, last = [text for form in part.get("anyOf", [part]) for text in _forms(form, found)]
    return f"{', '.join(others)} or {last}" if others else last


def _forms(form: Schema, found: Any) -> list[str]:
    if form.get("type") == "null":
        return []
    if "enum" in form:
        return [repr(word) for word in form["enum"]]
    if "prefixItems" in form:
        first, _ = form["prefixItems"]
        return [f"a pair of {_plural(expectation(first))}"]
    if form.get("type") == "array":
        few = "one or more " if form.get("minItems") else ""
        entries = found if isinstance(found, list) else []
        below = next((entry for entry in entries if _is_beyond(form["items"], entry)), None)
        return [f"a list of {few}{_plural(expectation(form['items'], below))}"]
    name = NAMES.get(form.get("type", "object"), "a table")
    is_finite = not isinstance(found, float) or not math.isinf(found)
    return [(name if is_finite else name.replace("a number", "a finite number")) + _range(form, found)]


def _is_beyond(part: Schema, found: Any) -> bool:
    return isinstance(found, int | float) and found > part.get("maximum", math.inf)


def _range(part: Schema, found: Any) -> str:
    to = "up to" if "exclusiveMinimum" in part else "to"
    limits = (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", to), ("exclusiveMaximum", "below"))
    named = [limit for limit in part if limit != "maximum" or part[limit] < FAR or _is_beyond(part, found)]
    return "".join(f" {word} {_number(part[limit])}" for limit, word in limits if limit in named)


def _number(limit: float) -> str:
    return f"{limit:,.0f}" if limit >= FAR else f"{limit:g}"


def _plural(expected: str) -> str:
    return re.sub(r"\b(pair|number|string)\b", r"\1s", expected.removeprefix("a "), count=1)
