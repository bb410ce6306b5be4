"""Whether a checkpoint is still what was written: every file is read and its hash compared, split over the ranks."""

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist

from meshtrain import console
from meshtrain.checkpoint.manifest import FormatError, read_manifest
from meshtrain.checkpoint.storage.directory import list_checkpoints
from meshtrain.checkpoint.storage.location import Location, SavedFile, errors_of, hash_file, reason_of
from meshtrain.errors import CheckpointError, Problem
from meshtrain.runtime.agreement import gather_objects


def find_damage(checkpoint: Location) -> list[Problem]:
    """Name everything about a checkpoint that is not as it was written. Collective.

    Each rank reads its share of the files.

    Raises:
        FormatError: if it is of another version of meshtrain.
    """
    try:
        files, problems = read_manifest(checkpoint).files, []
    except FormatError:
        # Nothing is wrong with it, and nothing older should take its place.
        raise
    except CheckpointError as error:
        # What to do is said by whoever asked: it may be to try an older checkpoint.
        files, problems = {}, [replace(problem, advice="") for problem in error.problems]
    for name in _share(files):
        if found := _damage(checkpoint / name, files[name]):
            problems.append(Problem(found))
    # Each problem once: all ranks read the manifest.
    return list(dict.fromkeys(problem for answer in gather_objects(problems) for problem in answer))


def newest_whole_checkpoint(root: Location) -> Location | None:
    """Return the newest checkpoint that is whole, and say of those before it what is wrong. Collective.

    Raises:
        CheckpointError: if there are checkpoints and none is whole, or they cannot be listed.
    """
    # Not all machines may see the newest at once: the first decides.
    checkpoints = agreed_checkpoints(root)
    for checkpoint in checkpoints:
        damage = find_damage(checkpoint)
        if not damage:
            return checkpoint
        for problem in damage:
            console.line(f"Damaged: {problem}")
        console.line(f"{checkpoint} is left out; the checkpoint before it is tried")
    if checkpoints:
        raise CheckpointError(
            f"{root}: none of its {len(checkpoints)} checkpoints is whole, see above; nothing was changed there. "
            "Restore one, or choose another run_directory to begin anew"
        )
    return None


def agreed_checkpoints(root: Location) -> list[Location]:
    """Return the complete checkpoints under `root` that the first process sees, newest first. Collective.

    Raises:
        CheckpointError: on all processes alike, if they cannot be listed.
    """
    checkpoints: list[Location] = []
    problems: tuple[Problem, ...] = ()
    try:
        checkpoints = list_checkpoints(root)
    except CheckpointError as error:
        problems = error.problems
    answer, problems = gather_objects((checkpoints, problems))[0]
    if problems:
        raise CheckpointError(problems)
    return answer


def _share(files: Mapping[str, SavedFile]) -> list[str]:
    """Return the names that this rank reads: every n-th, the largest first, so that all read about as much."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    by_size = sorted(files, key=lambda name: (-files[name].num_bytes, name))
    return by_size[rank::world_size]


def _damage(file: Location, wanted: SavedFile) -> str | None:
    try:
        num_bytes = file.stat().st_size
        if num_bytes != wanted.num_bytes:
            return f"{file} has {num_bytes:,} bytes and should have {wanted.num_bytes:,}"
        found = hash_file(file)
    except FileNotFoundError:
        return f"{file} is missing"
    except errors_of(file) as error:
        return f"{file} cannot be read: {reason_of(error)}"
    return None if found == wanted else f"{file} is not what was written: another content has the same size"
