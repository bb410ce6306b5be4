"""A checkpoint is a directory that exists completely or not at all.

ROOT/step-20/             a checkpoint: complete, because it was renamed into place
    __0_0.distcp ...      the tensors, written by DCP, one file per process
    .metadata             which block of which tensor is where, written by DCP
    manifest.json         what the tensors belong to
    huggingface/          config.json, generation_config.json and the tokenizer, as `export` hands them on
ROOT/step-30.tmp/         one being written, or what a killed save or removal left; never read
ROOT/step-20.old/         step-20 while a newer save of the same step takes its name; counts if there is no step-20
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from meshtrain.config.words import Words
from meshtrain.errors import CheckpointError
from meshtrain.models.fused import FusedParameter

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
HUGGINGFACE_NAME = "huggingface"
CHECKPOINTS_NAME = "checkpoints"
"""Where the checkpoints of a run lie inside its run directory."""

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
_COMPLETE = re.compile(r"step-(\d+)(\.old)?")
_LEFTOVER = re.compile(r"step-\d+(\.old|\.tmp|\.old\.tmp)")


class SavedLossScale(Words):
    """Where dynamic loss scaling stood."""

    value: float
    """The scale of the next step."""
    growth_steps: int
    """Steps without an overflow since the last overflow or growth."""
    hysteresis_left: int
    """Overflows until one lowers the scale."""


class Manifest(Words):
    """What the tensors of a checkpoint belong to."""

    format_version: int = FORMAT_VERSION
    """Of the directory; a newer one is refused."""
    step: int
    """Optimizer steps done."""
    skipped_steps: int = 0
    """How many of them overflowed and changed nothing: AdamW and the learning rate do not count them."""
    loss_scale: SavedLossScale | None = None
    """Of a run in float16."""
    seed: int
    """Of the run: with the step, the order of the data and every random draw."""
    global_batch_size: int
    """Sequences per optimizer step: with the step, the place in the data."""
    mesh: dict[str, int]
    """Axis -> degree of the mesh that saved it; any other can load it."""
    plan_hash: str
    """Of the resolved plan."""
    model_type: str
    """Hugging Face's `model_type`."""
    architecture: str
    """The stock class, such as `GPT2LMHeadModel`."""
    data_identity: str
    """Hash of what makes the data this one."""
    dtype: Dtype = "float32"
    """The number format of exported weights."""
    dtypes: dict[str, Dtype] = Field(default_factory=dict)
    """Stock FQN -> number format, where it differs from `dtype`."""
    fused: tuple[FusedParameter, ...] = ()
    """The stock parameters that are kept in parts."""
    tied: dict[str, str] = Field(default_factory=dict)
    """Stock FQN of a tied head -> the FQN under which the weight is kept."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Library -> version that saved it."""


def checkpoint_directory(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return root / f"step-{step}"


def draft_directory(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step is written before it is complete."""
    return root / f"step-{step}.tmp"


def list_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints under `root`, newest first."""
    found: dict[int, Path] = {}
    for path in sorted(root.glob("step-*")):  # "step-20" comes before "step-20.old"
        if _COMPLETE.fullmatch(path.name) and (path / MANIFEST_NAME).is_file():
            found.setdefault(_step_of(path), path)
    return [found[step] for step in sorted(found, reverse=True)]


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest one of the run directory or checkpoints root that it is.

    Raises:
        CheckpointError: if there is none, or it was never finished.
    """
    if path.name.endswith(".tmp"):
        raise CheckpointError(f"{path} was never finished: the save was cut off; use another checkpoint beside it")
    if (path / MANIFEST_NAME).is_file():
        return path
    for root in (path, path / CHECKPOINTS_NAME):
        if checkpoints := list_checkpoints(root):
            return checkpoints[0]
    found = f"has no {MANIFEST_NAME} and no step-N directory" if path.is_dir() else "is not a directory"
    raise CheckpointError(f"{path} is no checkpoint: it {found}; give a step-N directory or the run directory above it")


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: if it is missing, broken, or of a newer format.
    """
    path = checkpoint / MANIFEST_NAME
    try:
        text = path.read_text()
        version = json.loads(text)["format_version"]
    except OSError as error:
        raise CheckpointError(f"{checkpoint} is no checkpoint: cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is broken ({error}); use another checkpoint") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this meshtrain reads {FORMAT_VERSION}; "
            "use the meshtrain that saved it"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise CheckpointError(f"{path} is broken ({'; '.join(wrong)}); use another checkpoint") from error


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, last of all its files."""
    (checkpoint / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n")


def publish_checkpoint(draft: Path, final: Path) -> None:
    """Flush a draft to the disk and rename it into place, whole at every moment.

    A checkpoint of the same step is set aside first and stays valid until the new one has the name.
    """
    sync_tree(draft)
    if final.exists():
        aside = final.with_name(f"{final.name}.old")
        if aside.exists():
            _remove(aside)
        final.rename(aside)
    draft.rename(final)
    _sync(final.parent)


def prune_checkpoints(root: Path, *, step: int, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, and what killed saves left behind.

    Later steps belong to a future that was rewound; the run will overwrite them when it gets there.
    """
    checkpoints = list_checkpoints(root)
    leftovers = [path for path in root.glob("step-*") if _LEFTOVER.fullmatch(path.name) and path not in checkpoints]
    past = [path for path in checkpoints if _step_of(path) <= step]
    for path in [*leftovers, *past[keep:]]:
        _remove(path)


def sync_tree(directory: Path) -> None:
    """Flush a directory and everything in it to the disk."""
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _step_of(checkpoint: Path) -> int:
    match = _COMPLETE.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def _remove(directory: Path) -> None:
    # Out of sight first: a removal that is killed half way must not leave a checkpoint with files missing.
    hidden = directory
    if not directory.name.endswith(".tmp"):
        hidden = directory.with_name(f"{directory.name}.tmp")
        shutil.rmtree(hidden, ignore_errors=True)
        directory.rename(hidden)
    shutil.rmtree(hidden)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
