"""Save and load the tensors of a run on all ranks together, on any mesh.

Tensors have names as keys: "model.<FQN>", "optimizer.exp_avg.<FQN>", "optimizer.exp_avg_sq.<FQN>",
"optimizer.step.<FQN>". Several ranks may load the same key on different meshes, as each pipeline
stage has its own. Nothing is ever gathered.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshtrain.checkpoint.dcp.planner import Block, BlockSavePlanner, block_of
from meshtrain.checkpoint.dcp.reading import read_metadata, read_tensors, tensor_entries
from meshtrain.checkpoint.manifest import Manifest, write_manifest
from meshtrain.checkpoint.storage.directory import (
    HUGGINGFACE_NAME,
    USE_ANOTHER,
    checkpoint_directory,
    temporary_directory,
)
from meshtrain.checkpoint.storage.integrity import find_damage
from meshtrain.checkpoint.storage.location import (
    LocationSystem,
    SavedFile,
    children,
    remove_tree,
    write_hashed,
)
from meshtrain.checkpoint.storage.named_folder import check_new, locked_together, publish_folder, temporary_folder
from meshtrain.checkpoint.storage.publishing import (
    Retention,
    create_empty_directory,
    prune_checkpoints,
    publish_checkpoint,
)
from meshtrain.errors import CheckpointError, Problem, name_some, reason_of
from meshtrain.runtime.agreement import failing_together, gather_objects, is_first_rank, raise_together
from meshtrain.runtime.location import Location, errors_of, is_local

MODEL_PREFIX = "model."
AVERAGE_PREFIX = "ema."
Description = tuple[tuple[int, ...], torch.dtype]
HuggingFace = Callable[[Path], None] | None
"""Writes config and tokenizer into a directory. Called on rank 0 only."""


class _Outcome(NamedTuple):
    """What a failed write leaves behind, and what to do about it."""

    state: str
    advice: str

    def after(self, failure: str) -> Problem:
        return Problem(f"{failure}; {self.state}" if self.state else failure, self.advice)


def write_checkpoint(
    root: Location, tensors: Mapping[str, Tensor], *, manifest: Manifest, huggingface: HuggingFace, retention: Retention
) -> Location:
    """Write the checkpoint of a step, publish it, and remove old ones. Collective.

    Args:
        root: directory of the run's checkpoints. Every machine must see the same one.
        tensors: what this rank holds. A DTensor is written shard by shard, copies of a shard once.
        manifest: of this step. The entries about files are added here.
        huggingface: writes config and tokenizer.
        retention: which checkpoints stay.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: the same on all ranks, if any of them could not write. Earlier checkpoints
            stay as they are.
    """
    blocks = {key: block_of(tensor) for key, tensor in tensors.items()}
    return save_blocks(root, blocks, manifest=manifest, huggingface=huggingface, retention=retention)


def save_blocks(
    root: Location,
    blocks: Mapping[str, Block],
    *,
    manifest: Manifest,
    huggingface: HuggingFace,
    retention: Retention,
    group: ProcessGroup | None = None,
) -> Location:
    """Write a checkpoint as `write_checkpoint` does. It may run in a thread of its own.

    Args:
        group: all ranks, over gloo. It must differ from the group of the training, if that
            continues meanwhile.
    """
    step = manifest.step
    final = checkpoint_directory(root, step)
    outcome = _Outcome(f"step {step} is not saved, and earlier checkpoints are untouched", "make room, then resume")
    temporary = temporary_directory(root, step)
    _write_checkpoint(
        temporary,
        temporary,
        partial(publish_checkpoint, temporary, final),
        blocks,
        manifest=manifest,
        huggingface=huggingface,
        outcome=outcome,
        group=group,
    )
    kept = _Outcome(f"step {step} is saved, but the disk will fill up", "remove them by hand, then resume")
    _on_first_rank(
        root,
        partial(prune_checkpoints, root, step=step, retention=retention),
        f"cannot remove old checkpoints of {root}",
        kept,
        group,
    )
    return final


def save_folder(folder: Path, tensors: Mapping[str, Tensor], *, manifest: Manifest, huggingface: HuggingFace) -> None:
    """Write a checkpoint that belongs to no run into a folder of its own. Collective.

    Args:
        folder: must not exist, or be empty. It appears when it is complete.
        tensors: what this rank holds. A DTensor is written shard by shard, copies of a shard once.
        manifest: the entries about files are added here.
        huggingface: writes config and tokenizer.

    Raises:
        CheckpointError: the same on all ranks, if the folder is not empty or any rank could not
            write.
    """
    outcome = _Outcome("", "make room or write elsewhere")
    with locked_together(folder):
        _on_first_rank(folder, partial(check_new, folder), f"cannot write {folder}", outcome, None)
        temporary = gather_objects(temporary_folder(folder))[0]
        _write_checkpoint(
            folder,
            temporary,
            partial(publish_folder, temporary, folder),
            {key: block_of(tensor) for key, tensor in tensors.items()},
            manifest=manifest,
            huggingface=huggingface,
            outcome=outcome,
            group=None,
        )


def _write_checkpoint(
    named: Location,
    temporary: Location,
    publish: Callable[[], None],
    blocks: Mapping[str, Block],
    *,
    manifest: Manifest,
    huggingface: HuggingFace,
    outcome: _Outcome,
    group: ProcessGroup | None,
) -> None:
    """Write a checkpoint into a temporary directory, and publish it.

    Args:
        named: the location that error messages name.
    """
    failure = f"cannot write {named}"
    described: dict[str, SavedFile] = {}

    def begin() -> None:
        create_empty_directory(temporary)
        # Small files come first: their errors are found before the large files are written.
        described.update(_write_huggingface(temporary, huggingface))

    try:
        _on_first_rank(temporary, begin, failure, outcome, group)
        written = _write_blocks(named, temporary, blocks, outcome, group)
        finish = partial(_finish_checkpoint, temporary, publish, manifest, {**written, **described})
        _on_first_rank(temporary, finish, failure, outcome, group)
    except CheckpointError:
        # The next save removes what cannot be removed now.
        with suppress(*errors_of(temporary)):
            if is_first_rank() and (children(temporary) or (is_local(temporary) and temporary.is_dir())):
                remove_tree(temporary)
        raise


def restore_checkpoint(
    directory: Location,
    tensors: Mapping[str, Tensor],
    *,
    weights_only: bool = False,
    is_verified: bool = False,
) -> None:
    """Fill `tensors` in place from a checkpoint that was saved on any mesh. Collective.

    Args:
        directory: a checkpoint.
        tensors: what this rank needs. Together the ranks must request exactly what the checkpoint
            holds, with the same shapes and dtypes. DCP itself would cast silently and ignore
            tensors that no rank requests.
        weights_only: load the parameters and nothing else, in any number format. This starts a new
            training; it does not resume one.
        is_verified: whether the files were verified just now. Otherwise they are compared with
            their hashes first, because DCP loads a flipped byte without an error.

    Raises:
        CheckpointError: the same on all ranks, if files are missing or damaged, or the tensors are
            others.
    """
    if not is_verified and (damage := find_damage(directory)):
        raise CheckpointError(replace(problem, advice=USE_ANOTHER) for problem in damage)
    metadata = read_table(directory)
    wanted = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    together = _merge(gather_objects(wanted))
    raise_together(_loading_problems(directory, metadata, together, weights_only=weights_only), CheckpointError)
    with failing_together(CheckpointError):
        read_tensors(directory, metadata, tensors)


class _Writer(FileSystemWriter):
    """DCP's writer for any location. It raises OSError for a full disk.

    torch.save turns the OSError of the underlying file into "RuntimeError: unexpected pos 704 vs
    598". The writer uses one thread: an error in a second one is lost, and the save would count as
    complete.
    """

    def __init__(self, directory: Location) -> None:
        # Without `sync_files`: `write_hashed` flushes every file to the disk.
        super().__init__("", thread_count=1, sync_files=False)
        self.system = LocationSystem()
        self.fs = self.system  # type: ignore[assignment]
        self.path = directory  # type: ignore[assignment]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error.__context__
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror) from error
            raise

    def storage_meta(self) -> StorageMeta:
        """Return the metadata without the location of the checkpoint.

        The checkpoint may be moved, and only a few classes are allowed when the table is read.
        """
        return StorageMeta(save_id=self.save_id)


def _on_first_rank(
    where: Location, work: Callable[[], None], failure: str, outcome: _Outcome, group: ProcessGroup | None
) -> None:
    with failing_together(CheckpointError, group):
        if is_first_rank():
            try:
                work()
            except errors_of(where) as error:
                raise CheckpointError(outcome.after(f"rank 0 {failure}: {reason_of(error)}")) from error


def _write_blocks(
    named: Location, temporary: Location, blocks: Mapping[str, Block], outcome: _Outcome, group: ProcessGroup | None
) -> dict[str, SavedFile]:
    """Write the blocks of every rank, and return the files that all ranks have written."""
    writer = _Writer(temporary)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                dict(blocks),
                storage_writer=writer,
                planner=BlockSavePlanner(),
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        ranks: dict[str, list[str]] = defaultdict(list)
        for rank, (cause, _) in error.failures.items():
            if isinstance(cause, errors_of(temporary)):
                ranks[reason_of(cause)].append(str(rank))
        if not ranks:
            raise
        raise CheckpointError(
            outcome.after(f"rank{'s' if len(who) > 1 else ''} {name_some(who)} cannot write {named}: {reason}")
            for reason, who in ranks.items()
        ) from error
    return {name: saved for answer in gather_objects(writer.system.written, group) for name, saved in answer.items()}


def _finish_checkpoint(
    temporary: Location, publish: Callable[[], None], manifest: Manifest, written: Mapping[str, SavedFile]
) -> None:
    lost = [
        Problem(
            f"{temporary / name} is missing or cut off, though its rank wrote it",
            "put the run directory where every machine sees the same files",
        )
        for name, saved in sorted(written.items())
        if not (temporary / name).is_file() or (temporary / name).stat().st_size != saved.num_bytes
    ]
    if lost:
        raise CheckpointError(lost)
    write_manifest(temporary, manifest.model_copy(update={"files": dict(written)}))
    publish()


def _write_huggingface(temporary: Location, huggingface: HuggingFace) -> dict[str, SavedFile]:
    if huggingface is None:
        return {}
    files: dict[str, SavedFile] = {}
    with TemporaryDirectory() as name:
        source = Path(name)
        huggingface(source)
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            name = f"{HUGGINGFACE_NAME}/{file.relative_to(source).as_posix()}"
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            with write_hashed(temporary / name, lambda saved, name=name: files.update({name: saved})) as copy:  # type: ignore[misc]
                copy.write(file.read_bytes())
    return files


def read_table(directory: Location) -> Metadata:
    """Read DCP's table of a checkpoint. Collective.

    Raises:
        CheckpointError: the same on all ranks, if any of them cannot read it.
    """
    with failing_together(CheckpointError):
        return read_metadata(directory)


def _merge(answers: list[dict[str, Description]]) -> dict[str, Description]:
    merged: dict[str, Description] = {}
    for answer in answers:
        for key, description in answer.items():
            assert merged.setdefault(key, description) == description, f"ranks disagree on the shape or dtype of {key}"
    return merged


def _loading_problems(
    directory: Location, metadata: Metadata, wanted: Mapping[str, Description], *, weights_only: bool
) -> list[str]:
    """Return why the checkpoint cannot be loaded into `wanted`, one line per kind of difference."""
    saved = {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in tensor_entries(metadata, MODEL_PREFIX if weights_only else "").items()
    }
    missing = [key for key in wanted if key not in saved]
    unexpected = [key for key in saved if key not in wanted]
    both = [key for key in wanted if key in saved]
    shapes = [
        f"{key} is {saved[key][0]} in the checkpoint and {wanted[key][0]} in this run"
        for key in both
        if saved[key][0] != wanted[key][0]
    ]
    dtypes = [
        f"{key} is {saved[key][1]} in the checkpoint and {wanted[key][1]} in this run"
        for key in both
        if saved[key][1] != wanted[key][1] and not weights_only
    ]
    problems = [
        f"{directory} {what} ({len(names)}): {name_some(names)}"
        for what, names in (
            ("lacks what this run needs", missing),
            ("holds what this run does not have", unexpected),
            ("has other shapes", shapes),
            ("has other number formats", dtypes),
        )
        if names
    ]
    if problems:
        problems.append(
            "it is a checkpoint of another model or optimizer: resume with its own, or choose another run directory"
        )
    return problems
