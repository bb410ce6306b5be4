"""Publish checkpoints, and remove old ones.

A checkpoint is written into a temporary directory and published when it is complete. It is removed
when newer ones exist.
"""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshtrain import console
from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.checkpoint.storage.directory import MANIFEST_NAME, list_checkpoints, step_named, step_of
from meshtrain.checkpoint.storage.location import children, files_below, remove_tree
from meshtrain.errors import CheckpointError, name_some
from meshtrain.runtime.disk import flush
from meshtrain.runtime.location import Location, is_local

_LEFTOVER = re.compile(r"step-\d+(\.old|\.tmp|\.old\.tmp)")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Attributes:
        newest: number of the newest checkpoints that stay.
        every: checkpoints whose step is a multiple of this number stay forever.
        best: number of checkpoints with the lowest evaluation loss that also stay.
    """

    newest: int
    every: int | None = None
    best: int = 0


def create_empty_directory(directory: Location) -> None:
    """Create an empty temporary directory in which a checkpoint is written."""
    if children(directory) or (is_local(directory) and directory.exists()):
        # Remove the manifest first: in an object store this may be a published checkpoint.
        (directory / MANIFEST_NAME).unlink(missing_ok=True)
        remove_tree(directory)
    directory.mkdir(parents=True, exist_ok=True)


def publish_checkpoint(temporary: Location, final: Location) -> None:
    """Move a temporary directory, whose files are on the disk, to its final name.

    A complete checkpoint of this step exists at every moment: an earlier one is renamed first, and
    stays valid until the new one has the name. In an object store, the directory has its final name
    already.
    """
    if not isinstance(temporary, Path) or not isinstance(final, Path):
        return
    for directory in [*(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
        flush(directory)
    if final.exists():
        aside = final.with_name(f"{final.name}.old")
        if aside.exists():
            _remove(aside)
        final.rename(aside)
    temporary.rename(final)
    flush(final.parent)


def prune_checkpoints(root: Location, *, step: int, retention: Retention) -> None:
    """Remove checkpoints up to `step` that need not stay, and what killed saves left behind.

    Later steps were written before a rewind. The run overwrites them when it reaches them. A
    checkpoint stays if it holds files that are not its own, or if its manifest cannot be read.
    """
    checkpoints = list_checkpoints(root)
    past = [path for path in checkpoints if step_of(path) <= step]
    kept = _kept(past, retention)
    for path in _leftovers(root, checkpoints):
        _remove(path)
    for path in past:
        if path in kept:
            continue
        try:
            foreign = foreign_files(path)
        except CheckpointError as error:
            console.line(f"{path} stays, because its manifest cannot be read: {error.lines[0]}")
            continue
        if foreign:
            console.line(f"{path} stays, because it holds files that are not its own: {name_some(foreign)}")
        else:
            _remove(path)


def foreign_files(checkpoint: Location) -> list[str]:
    """Return the names of the files that a checkpoint's manifest does not list.

    Raises:
        CheckpointError: if the manifest cannot be read.
    """
    known = {*read_manifest(checkpoint).files, MANIFEST_NAME}
    return [name for name, _ in files_below(checkpoint) if name not in known]


def _kept(newest_first: list[Location], retention: Retention) -> list[Location]:
    kept = newest_first[: retention.newest]
    if retention.every is not None:
        kept += [path for path in newest_first if step_of(path) % retention.every == 0]
    if retention.best:
        kept += _best(newest_first, retention.best)
    return kept


def _best(checkpoints: Iterable[Location], number: int) -> list[Location]:
    losses: list[tuple[float, Location]] = []
    for path in checkpoints:
        try:
            loss = read_manifest(path).evaluation_loss
        except CheckpointError:
            # The checkpoint is damaged. This is reported when it is loaded.
            continue
        if loss is not None:
            losses.append((loss, path))
    return [path for _, path in sorted(losses, key=lambda item: item[0])[:number]]


def _leftovers(root: Location, checkpoints: list[Location]) -> list[Location]:
    if is_local(root):
        return [path for path in children(root) if _LEFTOVER.fullmatch(path.name) and path not in checkpoints]
    unfinished = [path for path in children(root) if step_named(path) is not None and path not in checkpoints]
    return [path for path in unfinished if any(child.name.endswith(".distcp") for child in children(path))]


def _remove(directory: Location) -> None:
    # Hide the checkpoint first: a removal that is killed halfway must not leave one with missing
    # files.
    if not isinstance(directory, Path):
        (directory / MANIFEST_NAME).unlink(missing_ok=True)
        remove_tree(directory)
        return
    hidden = directory
    if not directory.name.endswith(".tmp"):
        hidden = directory.with_name(f"{directory.name}.tmp")
        shutil.rmtree(hidden, ignore_errors=True)
        directory.rename(hidden)
    shutil.rmtree(hidden)
