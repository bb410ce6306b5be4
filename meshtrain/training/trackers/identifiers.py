"""trackers.json of a run directory: tracker -> its run, which a resumption continues."""

import json
from pathlib import Path

from meshtrain.config.reading import shown_path
from meshtrain.data.cache import write_atomically
from meshtrain.errors import ConfigError, reason_of

TRACKERS_NAME = "trackers.json"


def read_identifiers(run_directory: Path) -> dict[str, str]:
    """Return tracker -> identifier of its run; empty before the first start.

    Raises:
        ConfigError: if the file cannot be read.
    """
    path = run_directory / TRACKERS_NAME
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{shown_path(path)} cannot be read: {reason_of(error)}", "correct it, or remove it to begin new runs"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(identifier, str) for identifier in found.values()):
        raise ConfigError(
            f"{shown_path(path)} is not an object of strings", "correct it, or remove it to begin new runs"
        )
    return found


def write_identifier(run_directory: Path, tracker: str, identifier: str) -> None:
    """Keep the identifier of a tracker's run.

    Raises:
        ConfigError: if the file cannot be written.
    """
    path = run_directory / TRACKERS_NAME
    known = read_identifiers(run_directory)
    try:
        write_atomically(path, json.dumps({**known, tracker: identifier}, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write {shown_path(path)}: {reason_of(error)}",
            "free disk space, or set run_directory to another directory",
        ) from error
