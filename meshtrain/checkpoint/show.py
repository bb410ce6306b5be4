"""The commands `meshtrain checkpoint list` and `meshtrain checkpoint verify`."""

from meshtrain import console
from meshtrain.checkpoint.manifest import FormatError, read_manifest
from meshtrain.checkpoint.storage.directory import find_checkpoints, is_checkpoint
from meshtrain.checkpoint.storage.integrity import find_damage
from meshtrain.checkpoint.storage.location import shown_location
from meshtrain.checkpoint.storage.publishing import foreign_files
from meshtrain.config.mesh import MeshPlan
from meshtrain.errors import CheckpointError, Problem, name_some
from meshtrain.runtime.location import Location

COLUMNS = ("checkpoint", "evaluation loss", "bytes", "files", "saved on", "model", "precision")


def show_checkpoints(location: Location) -> None:
    """Print the checkpoints of a run directory or checkpoints directory as a table, newest first.

    Raises:
        CheckpointError: if there is none.
    """
    console.table(str(location), COLUMNS, [_row(checkpoint) for checkpoint in _checkpoints(location)])


def verify_checkpoints(location: Location) -> None:
    """Compare every file of a checkpoint, or of all checkpoints of a directory, with its hash.

    Raises:
        CheckpointError: naming everything that differs from what was written.
    """
    problems: list[Problem] = []
    for checkpoint in _checkpoints(location):
        found = _problems(checkpoint)
        problems += found
        if not found:
            files = read_manifest(checkpoint).files
            num_bytes = sum(file.num_bytes for file in files.values())
            console.line(f"{shown_location(checkpoint)} is intact: {len(files)} files, {num_bytes:,} bytes")
    if problems:
        raise CheckpointError(problems)


def _problems(checkpoint: Location) -> list[Problem]:
    try:
        found = find_damage(checkpoint)
    except FormatError as error:
        return list(error.problems)
    if found:
        return found
    foreign = foreign_files(checkpoint)
    where = shown_location(checkpoint)
    return (
        [Problem(f"{where} holds files that are not its own: {name_some(foreign)}", "move them away")]
        if foreign
        else []
    )


def _checkpoints(location: Location) -> list[Location]:
    return [location] if is_checkpoint(location) else find_checkpoints(location)


def _row(checkpoint: Location) -> tuple[object, ...]:
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return (checkpoint.name, error.lines[0], *[""] * (len(COLUMNS) - 2))
    loss = "" if manifest.evaluation_loss is None else f"{manifest.evaluation_loss:.4f}"
    num_bytes = sum(file.num_bytes for file in manifest.files.values())
    columns = (
        f"{num_bytes:,}",
        len(manifest.files),
        MeshPlan(**manifest.mesh).described(),
        manifest.architecture,
        manifest.dtype,
    )
    return (checkpoint.name, loss, *columns)
