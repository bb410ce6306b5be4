"""Names and layout of checkpoints. A checkpoint exists completely or not at all.

ROOT/step-20/             a checkpoint: complete, because its manifest was written last
    __0_0.distcp ...      the tensors, written by DCP, one file per process
    .metadata             where each block of each tensor is stored, written by DCP
    huggingface/          config.json, generation_config.json and tokenizer; `export` copies them
    manifest.json         what the tensors belong to, and the hash of every other file
ROOT/step-30.tmp/         being written, or left by a killed save or removal; never read
ROOT/step-20.old/         step-20 while a newer save of the same step takes its name;
                          it counts if there is no step-20

ROOT may be a URL. Object stores cannot rename a directory. There a checkpoint is written under its
final name, and a directory without a manifest is not a checkpoint. The newest checkpoint is never
stored; it is found by listing ROOT.
"""

import re

from meshtrain.checkpoint.storage.location import children, errors_in_one_line, file_names
from meshtrain.errors import CheckpointError, Problem
from meshtrain.runtime.location import Location, is_local

MANIFEST_NAME = "manifest.json"
HUGGINGFACE_NAME = "huggingface"
CHECKPOINTS_NAME = "checkpoints"
"""Directory of a run's checkpoints inside its run directory, unless the run sets another one."""

_COMPLETE = re.compile(r"step-(\d+)(\.old)?")

USE_ANOTHER = "use another checkpoint"
"""Advice for a checkpoint that is broken."""


def checkpoint_directory(root: Location, step: int) -> Location:
    """Return the directory of the checkpoint of a step."""
    return root / f"step-{step}"


def temporary_directory(root: Location, step: int) -> Location:
    """Return the directory in which the checkpoint of a step is written before it is complete."""
    return root / (f"step-{step}.tmp" if is_local(root) else f"step-{step}")


def list_checkpoints(root: Location) -> list[Location]:
    """Return the complete checkpoints under `root`, newest first. Their files are not verified.

    Raises:
        CheckpointError: if the location cannot be reached.
    """
    found: dict[int, Location] = {}
    with errors_in_one_line(root):
        for path in children(root):  # "step-20" comes before "step-20.old"
            if step_named(path) is not None and MANIFEST_NAME in file_names(path):
                found.setdefault(step_of(path), path)
    return [found[step] for step in sorted(found, reverse=True)]


def find_checkpoint(path: Location) -> Location:
    """Return `path` if it is a checkpoint, or else the newest checkpoint in it.

    Args:
        path: a checkpoint, a run directory or a checkpoints root.

    Raises:
        CheckpointError: if there is none, or it was never finished.
    """
    if path.name.endswith(".tmp"):
        raise CheckpointError(Problem(f"{path} was never finished: the save was cut off", f"{USE_ANOTHER} beside it"))
    return path if is_checkpoint(path) else find_checkpoints(path)[0]


def is_checkpoint(path: Location) -> bool:
    """Return whether a directory is a complete checkpoint.

    Raises:
        CheckpointError: if the location cannot be reached.
    """
    with errors_in_one_line(path):
        return MANIFEST_NAME in file_names(path)


def find_checkpoints(path: Location) -> list[Location]:
    """Return the checkpoints of a run directory or checkpoints root, newest first.

    Raises:
        CheckpointError: if there is none.
    """
    for root in (path, path / CHECKPOINTS_NAME):
        if checkpoints := list_checkpoints(root):
            return checkpoints
    found = f"has no {MANIFEST_NAME} and no step-N directory" if path.is_dir() else "is not a directory"
    raise CheckpointError(
        f"{path} is not a checkpoint: it {found}", "use a step-N directory or the run directory above it"
    )


def step_of(checkpoint: Location) -> int:
    """Return the step in the name of a checkpoint."""
    step = step_named(checkpoint)
    assert step is not None
    return step


def step_named(folder: Location) -> int | None:
    """Return the step in the name of a folder, or None if it is not the name of a checkpoint."""
    match = _COMPLETE.fullmatch(folder.name)
    return None if match is None else int(match[1])
