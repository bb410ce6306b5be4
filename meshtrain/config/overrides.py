"""Overrides: lines of TOML on the command line, such as `plan.mesh.tp=4`."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtrain.config.arguments import check_strings
from meshtrain.config.parsing import parse_toml, unusable_values
from meshtrain.config.problems import problem, shortened
from meshtrain.config.tables import Setting, SettingSource, Table, as_table

FORM = "expected key=value, as in plan.mesh.tp=4"
QUOTING = """quote lists and tables for the shell, as in 'data.train=["a.jsonl"]'"""


def read_overrides(lines: Sequence[str], problems: list[str]) -> list[Table]:
    """Return a table for each override; those that cannot be read are added to `problems`.

    A value that is not TOML is taken as a string (`run_directory=out`). An empty value removes the
    key (`epochs=`), so that a key that excludes it can be set.

    Raises:
        ConfigError: if `lines` is not a list of strings.
    """
    check_strings("overrides", lines, "a list of strings, such as ['mesh.tp=4']")
    source = SettingSource("command line", Path.cwd())
    tables = []
    for line in lines:
        try:
            values = _parsed(line)
        except tomllib.TOMLDecodeError:
            found = shortened(repr(line))
            problems.append(problem(source, (), f"cannot read {found}; {QUOTING if _is_compound(line) else FORM}"))
            continue
        unusable = [problem(source, key, said) for key, said in unusable_values(values)]
        if unusable:
            problems += unusable
            continue
        table = as_table(values, source)
        if isinstance(table.get("extends"), Setting):
            problems.append(problem(source, ("extends",), "only a file can extend another; name that file instead"))
            continue
        tables.append(table)
    return tables


def _parsed(line: str) -> dict[str, Any]:
    key, equals, value = line.partition("=")
    # A line break would allow several settings in one override.
    if not equals or "\n" in key or key.lstrip().startswith(("#", "[")):
        raise tomllib.TOMLDecodeError
    try:
        return parse_toml(line)
    except tomllib.TOMLDecodeError:
        if _is_compound(line):
            raise
        return _with_leaf(parse_toml(f"{key} = 0"), value.strip() or None)


def _is_compound(line: str) -> bool:
    return line.partition("=")[2].lstrip().startswith(("[", "{", '"', "'"))


def _with_leaf(table: dict[str, Any], value: str | None) -> dict[str, Any]:
    ((name, below),) = table.items()
    return {name: _with_leaf(below, value) if isinstance(below, dict) else value}
