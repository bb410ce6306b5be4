"""Settings of files and the command line before they are checked: tables with sources."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

Key = tuple[str, ...]
Table = dict[str, Union["Table", "Setting"]]


@dataclass(frozen=True)
class SettingSource:
    """A file, or the command line."""

    label: str
    """The name that the user sees."""
    directory: Path
    """The directory that its relative paths are relative to."""
    inside: Key = ()
    """The table of the run that it fills: ("plan",) for a plan file that a run names."""


@dataclass(frozen=True)
class Setting:
    """One value with its source. None (which TOML does not have) removes the key."""

    value: Any
    source: SettingSource


def as_table(values: dict[str, Any], source: SettingSource) -> Table:
    """Return a table in which every value has its source."""
    return {
        name: as_table(value, source) if isinstance(value, dict) else Setting(value, source)
        for name, value in values.items()
    }


def plain(table: Table) -> dict[str, Any]:
    """Return the values alone, without removed keys."""
    values = {name: plain(node) if isinstance(node, dict) else node.value for name, node in table.items()}
    return {name: value for name, value in values.items() if value is not None}


def merge_tables(base: Table, top: Table) -> None:
    """Merge `top` into `base`: tables merge key by key, anything else (a list too) is replaced."""
    for name, node in top.items():
        below = base.get(name)
        if isinstance(node, dict) and isinstance(below, dict):
            merge_tables(below, node)
        else:
            base[name] = node


def walk(table: Table, key: Key) -> Iterator[tuple[Key, Table | Setting]]:
    """Yield the nodes on the path to `key`, as far as it exists, the table itself first."""
    node: Table | Setting = table
    yield (), node
    for depth, name in enumerate(key, start=1):
        if isinstance(node, Setting) or name not in node:
            return
        node = node[name]
        yield key[:depth], node


def leaves(table: Table, above: Key = ()) -> Iterator[tuple[Key, Setting]]:
    """Yield every setting with its key."""
    for name, node in table.items():
        if isinstance(node, Setting):
            yield (*above, name), node
        else:
            yield from leaves(node, (*above, name))
