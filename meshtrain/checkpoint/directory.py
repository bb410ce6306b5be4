"""A checkpoint is a directory that exists completely or not at all.

ROOT/step-20/             a checkpoint: complete, because its manifest was written last
    __0_0.distcp ...      the tensors, written by DCP, one file per process
    .metadata             which block of which tensor is where, written by DCP
    huggingface/          config.json, generation_config.json and the tokenizer, as `export` hands them on
    manifest.json         what the tensors belong to, and the hash of every other file
ROOT/step-30.tmp/         one being written, or what a killed save or removal left; never read
ROOT/step-20.old/         step-20 while a newer save of the same step takes its name; counts if there is no step-20

ROOT may be a URL. Object stores cannot rename a directory: there a checkpoint is written under its own name, and what
has no manifest is none. Which checkpoint is the latest is never stored: it is looked up.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import Field, ValidationError

from meshtrain import console
from meshtrain.checkpoint.location import (
    Location,
    SavedFile,
    children,
    errors_of,
    file_names,
    files_below,
    is_local,
    reason_of,
    remove_tree,
    told_in_a_line,
    write_hashed,
)
from meshtrain.config.words import Words
from meshtrain.errors import CheckpointError, name_some
from meshtrain.models.fused import FusedParameter

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
HUGGINGFACE_NAME = "huggingface"
CHECKPOINTS_NAME = "checkpoints"
"""Where the checkpoints of a run lie inside its run directory, unless it says otherwise."""

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
_COMPLETE = re.compile(r"step-(\d+)(\.old)?")
_LEFTOVER = re.compile(r"step-\d+(\.old|\.tmp|\.old\.tmp)")


class FormatError(CheckpointError):
    """A checkpoint of another version of meshtrain: whole perhaps, but not for this one."""


class SavedLossScale(Words):
    """Where dynamic loss scaling stood."""

    value: float
    """The scale of the next step."""
    growth_steps: int
    """Steps without an overflow since the last overflow or growth."""
    hysteresis_left: int
    """Overflows until one lowers the scale."""


class SavedHistory(Words):
    """What a run remembers of its steps."""

    bad_steps: int = 0
    """Bad steps that were skipped."""
    bad_in_a_row: int = 0
    """Bad steps since the last good one."""
    left_out: tuple[int, ...] = ()
    """Places in the data, in batches from 0, that rewinds have left out."""
    losses: tuple[float, ...] = ()
    """Of the latest good steps, to tell a spike by."""
    norms: tuple[float, ...] = ()
    """Gradient norms of the same steps."""


class SavedGroup(Words):
    """A group of parameters of an optimizer."""

    options: str
    """JSON: what the group has beside its parameters, such as the learning rate."""
    parameters: tuple[str, ...]
    """Their FQNs, sorted."""


class SavedOptimizer(Words):
    """The optimizer of a program of its own; a run's is known from its configuration."""

    name: str
    """The class, such as `AdamW`."""
    groups: tuple[SavedGroup, ...]
    """As they were given to it."""
    scalars: tuple[str, ...] = ("step",)
    """The states that are one number for each parameter; all others are laid out as the parameter."""
    numbers: tuple[str, ...] = ()
    """Those of the scalars that are numbers of Python and no tensors."""


class Manifest(Words):
    """What the tensors of a checkpoint belong to."""

    format_version: int = FORMAT_VERSION
    """Of the directory; a newer one is refused."""
    step: int
    """Optimizer steps done."""
    skipped_steps: int = 0
    """How many of them changed nothing, bad or overflowed: AdamW and the learning rate do not count them."""
    loss_scale: SavedLossScale | None = None
    """Of a run in float16."""
    history: SavedHistory | None = None
    """Of a run that met bad steps, or watches for spikes."""
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
    streams: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Source -> where it is to be read on from, of those that are streamed."""
    dtype: Dtype = "float32"
    """The number format of the parameters in training."""
    dtypes: dict[str, Dtype] = Field(default_factory=dict)
    """Stock FQN -> number format in which it is exported, whatever that of the others."""
    fused: tuple[FusedParameter, ...] = ()
    """The stock parameters that are kept in parts."""
    tied: dict[str, str] = Field(default_factory=dict)
    """Stock FQN of a tied head -> the FQN under which the weight is kept."""
    evaluation_loss: float | None = None
    """Mean loss on the validation data after this step, in nats, if there was an evaluation."""
    order: dict[str, bool] = Field(default_factory=dict)
    """What decides the order of the samples beside seed and batch: the keys of the run's data and their values."""
    optimizer: SavedOptimizer | None = None
    """What its tensors do not say, of a program that is no run."""
    forward_passes: int = 0
    """In training, of a program that is no run: what its dropout is a function of, as that of a run is of the step."""
    values: str = "{}"
    """JSON: what a person's own program, or own hook, wants back."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Library -> version that saved it."""
    files: dict[str, SavedFile] = Field(default_factory=dict)
    """Name -> what the file must be, for every file but this one."""
    checksum: str = ""
    """Of this manifest."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Attributes:
        newest: how many of the newest.
        every: also those whose step is a multiple of it, for ever.
        best: also so many of those with the lowest evaluation loss.
    """

    newest: int
    every: int | None = None
    best: int = 0


def checkpoint_directory(root: Location, step: int) -> Location:
    """Return where the checkpoint of a step lies."""
    return root / f"step-{step}"


def draft_directory(root: Location, step: int) -> Location:
    """Return where the checkpoint of a step is written before it is complete."""
    return root / (f"step-{step}.tmp" if is_local(root) else f"step-{step}")


def list_checkpoints(root: Location) -> list[Location]:
    """Return the complete checkpoints under `root`, newest first; whether their files are whole is not looked at.

    Raises:
        CheckpointError: if the location cannot be reached.
    """
    found: dict[int, Location] = {}
    with told_in_a_line(root):
        for path in children(root):  # "step-20" comes before "step-20.old"
            if _COMPLETE.fullmatch(path.name) and MANIFEST_NAME in file_names(path):
                found.setdefault(step_of(path), path)
    return [found[step] for step in sorted(found, reverse=True)]


def find_checkpoint(path: Location) -> Location:
    """Return `path` if it is a checkpoint, or the newest one of the run directory or checkpoints root that it is.

    Raises:
        CheckpointError: if there is none, or it was never finished.
    """
    if path.name.endswith(".tmp"):
        raise CheckpointError(f"{path} was never finished: the save was cut off; use another checkpoint beside it")
    return path if is_checkpoint(path) else find_checkpoints(path)[0]


def is_checkpoint(path: Location) -> bool:
    """Whether a directory is a complete checkpoint.

    Raises:
        CheckpointError: if the location cannot be reached.
    """
    with told_in_a_line(path):
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
    raise CheckpointError(f"{path} is no checkpoint: it {found}; give a step-N directory or the run directory above it")


def read_manifest(checkpoint: Location) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        FormatError: if another version of meshtrain wrote it.
        CheckpointError: if it is missing or broken.
    """
    path = checkpoint / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except errors_of(path) as error:
        raise CheckpointError(f"{checkpoint} is no checkpoint: cannot read {path}: {reason_of(error)}") from error
    try:
        version = json.loads(text)["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is broken ({error}); use another checkpoint") from error
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version}, this meshtrain reads {FORMAT_VERSION}; "
            "use the meshtrain that saved it"
        )
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise CheckpointError(f"{path} is broken ({'; '.join(wrong)}); use another checkpoint") from error
    # A field that the writer did not know was not part of its checksum.
    if manifest.checksum != _checksum(manifest, is_read=True):
        raise CheckpointError(f"{path} is broken (its checksum is that of another content); use another checkpoint")
    if _COMPLETE.fullmatch(checkpoint.name) and step_of(checkpoint) != manifest.step:
        raise CheckpointError(f"{path} is that of step {manifest.step}; use another checkpoint")
    return manifest


def write_manifest(checkpoint: Location, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, last of all its files."""
    checked = manifest.model_copy(update={"checksum": _checksum(manifest)})
    with write_hashed(checkpoint / MANIFEST_NAME, lambda _: None) as file:
        file.write((checked.model_dump_json(indent=2) + "\n").encode())


def check_new(folder: Path) -> None:
    """Refuse a folder that has something in it.

    Raises:
        CheckpointError: if it has.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty; write into a new folder")


def start_draft(draft: Location) -> None:
    """Make an empty directory to write a checkpoint into."""
    if children(draft) or (is_local(draft) and draft.exists()):
        # First what makes it a checkpoint, if it is one: this may be an object store.
        (draft / MANIFEST_NAME).unlink(missing_ok=True)
        remove_tree(draft)
    draft.mkdir(parents=True, exist_ok=True)


def publish_checkpoint(draft: Location, final: Location) -> None:
    """Give a draft whose files are on the disk its name, whole at every moment.

    A checkpoint of the same step is set aside first and stays valid until the new one has the name. In an object store
    the draft has its name already.
    """
    if not isinstance(draft, Path) or not isinstance(final, Path):
        return
    for directory in [*(path for path in draft.rglob("*") if path.is_dir()), draft]:
        _sync(directory)
    if final.exists():
        aside = final.with_name(f"{final.name}.old")
        if aside.exists():
            _remove(aside)
        final.rename(aside)
    draft.rename(final)
    _sync(final.parent)


def prune_checkpoints(root: Location, *, step: int, retention: Retention) -> None:
    """Remove checkpoints up to `step` that need not stay, and what killed saves left behind.

    Later steps belong to a future that was rewound; the run will overwrite them when it gets there. A checkpoint with
    files in it that are not its own is left to the person who put them there.
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
            console.line(f"{path} stays, for what belongs to it is not known: {error.problems[0]}")
            continue
        if foreign:
            console.line(f"{path} stays, for it holds files that are not its own: {name_some(foreign)}")
        else:
            _remove(path)


def foreign_files(checkpoint: Location) -> list[str]:
    """Return the names of the files that a checkpoint's manifest does not know.

    Raises:
        CheckpointError: if the manifest cannot be read.
    """
    known = {*read_manifest(checkpoint).files, MANIFEST_NAME}
    return [name for name, _ in files_below(checkpoint) if name not in known]


def sync_tree(directory: Path) -> None:
    """Flush a directory and everything in it to the disk."""
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def step_of(checkpoint: Location) -> int:
    """Return the step that the name of a checkpoint says."""
    match = _COMPLETE.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def step_named(folder: Location) -> int:
    """Return the step that a name says; 0 if it says none."""
    return step_of(folder) if _COMPLETE.fullmatch(folder.name) else 0


def _checksum(manifest: Manifest, *, is_read: bool = False) -> str:
    return xxhash.xxh3_128_hexdigest(manifest.model_dump_json(exclude={"checksum"}, exclude_unset=is_read).encode())


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
            # Damaged: it will be said when somebody wants to load it.
            continue
        if loss is not None:
            losses.append((loss, path))
    return [path for _, path in sorted(losses, key=lambda item: item[0])[:number]]


def _leftovers(root: Location, checkpoints: list[Location]) -> list[Location]:
    if is_local(root):
        return [path for path in children(root) if _LEFTOVER.fullmatch(path.name) and path not in checkpoints]
    unfinished = [path for path in children(root) if _COMPLETE.fullmatch(path.name) and path not in checkpoints]
    return [path for path in unfinished if any(child.name.endswith(".distcp") for child in children(path))]


def _remove(directory: Location) -> None:
    # Out of sight first: a removal that is killed half way must not leave a checkpoint with files missing.
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
