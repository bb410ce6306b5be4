"""Verify checkpoints: every file is read and its hash compared. The ranks share the files."""

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist

from meshtrain import console
from meshtrain.checkpoint.manifest import FormatError, read_manifest
from meshtrain.checkpoint.storage.directory import list_checkpoints
from meshtrain.checkpoint.storage.location import SavedFile, hash_file
from meshtrain.errors import CheckpointError, Problem, reason_of
from meshtrain.runtime.agreement import gather_objects
from meshtrain.runtime.location import Location, errors_of


def find_damage(checkpoint: Location) -> list[Problem]:
    """Return every difference between a checkpoint and what was written. Collective.

    Each rank reads its share of the files.

    Raises:
        FormatError: if another version of meshtrain wrote the checkpoint.
    """
    try:
        files, problems = read_manifest(checkpoint).files, []
    except FormatError:
        # The checkpoint is not damaged, so no older one should replace it.
        raise
    except CheckpointError as error:
        # The caller decides what to do: it may try an older checkpoint.
        files, problems = {}, [replace(problem, advice="") for problem in error.problems]
    for name in _share(files):
        if found := _damage(checkpoint / name, files[name]):
            problems.append(Problem(found))
    # Each problem is reported once, although all ranks read the manifest.
    return list(dict.fromkeys(problem for answer in gather_objects(problems) for problem in answer))


def newest_intact_checkpoint(root: Location) -> Location | None:
    """Return the newest intact checkpoint, and print the damage of newer ones. Collective.

    Returns:
        None if there are no checkpoints.

    Raises:
        CheckpointError: if there are checkpoints and none is intact, or they cannot be listed.
    """
    # Some machines may not see the newest checkpoint yet, so the first process decides.
    checkpoints = agreed_checkpoints(root)
    for checkpoint in checkpoints:
        damage = find_damage(checkpoint)
        if not damage:
            return checkpoint
        for problem in damage:
            console.line(f"Damaged: {problem}")
        console.line(f"{checkpoint} is skipped; the checkpoint before it is tried")
    if checkpoints:
        raise CheckpointError(
            f"{root}: none of its {len(checkpoints)} checkpoints is intact, see above; nothing was changed there",
            "restore one, or choose another run_directory to start again",
        )
    return None


def agreed_checkpoints(root: Location) -> list[Location]:
    """Return the complete checkpoints under `root` that rank 0 sees, newest first. Collective.

    Raises:
        CheckpointError: the same on all processes, if they cannot be listed.
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
    """Return the names of the files that this rank reads.

    Each rank takes every n-th file, the largest first, so that all ranks read about the same number
    of bytes.
    """
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
    return None if found == wanted else f"{file} is not what was written: the size is right, but the content differs"
