"""The paths in a run or corpus file, which are relative to the file that names them."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshtrain.config.path_rules import path_problem
from meshtrain.config.reading import absolute_path
from meshtrain.config.tables import Key, Table

PATHS = (
    ("run_directory",),
    ("checkpoint", "directory"),
    ("data", "train"),
    ("data", "validation"),
    ("data", "sources", "*", "train"),
    ("data", "sources", "*", "validation"),
    ("data", "cache_directory"),
    ("tasks", "folder"),
    ("distillation", "teacher"),
)
CORPUS_PATHS = (
    ("directory",),
    ("sources",),
    ("urls", "lists"),
    ("urls", "blacklisted_domains"),
    ("urls", "blacklisted_extensions"),
    ("clean", "tokenizer"),
)
PATHS_OR_HUB_IDS = (("model", "path"), ("data", "tokenizer", "path"))
MACHINE_FILE_OR_NAME = ("machine",)
BUILT_IN_SOURCES = ("python-stdlib",)
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def with_absolute_paths(table: Table, paths: Sequence[Key] = PATHS, above: Key = ()) -> Table:
    """Return a table with absolute paths in place of relative ones, and with `~` expanded.

    Hub ids, URLs and built-in sources stay as they are.

    Args:
        table: the settings of a file, or one of its tables.
        paths: the keys of such a file that hold paths.
        above: key of that table in the file.
    """
    resolved: Table = {}
    for name, node in table.items():
        key = (*above, name)
        if isinstance(node, dict):
            resolved[name] = with_absolute_paths(node, paths, key)
        elif _is_path(key, paths) or key in PATHS_OR_HUB_IDS or _names_machine_file(key, node.value):
            resolved[name] = replace(node, value=_absolute(node.value, key, node.source.directory))
        else:
            resolved[name] = node
    return resolved


def _is_path(key: Key, paths: Sequence[Key]) -> bool:
    return any(
        len(pattern) == len(key) and all(word in ("*", name) for word, name in zip(pattern, key, strict=True))
        for pattern in paths
    )


def _names_machine_file(key: Key, value: Any) -> bool:
    return key == MACHINE_FILE_OR_NAME and isinstance(value, str) and value.endswith(".toml")


def _absolute(value: Any, key: Key, directory: Path) -> Any:
    if isinstance(value, list):
        return [_absolute(entry, key, directory) for entry in value]
    if not isinstance(value, str) or "://" in value or path_problem(value):
        return value
    path = absolute_path(value, directory)
    is_name = is_hub_id(value) and not path.exists() if key in PATHS_OR_HUB_IDS else value in BUILT_IN_SOURCES
    return value if is_name else str(path)


def is_hub_id(text: str) -> bool:
    """Return whether a text can be the name of a repository on the hub: `name` or `owner/name`."""
    return HUB_ID.fullmatch(text) is not None and not text.endswith(".json")
