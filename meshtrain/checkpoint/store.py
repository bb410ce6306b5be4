"""Save and load the tensors of a run, all ranks together, on any mesh.

Tensors go by name: "model.<FQN>", "optimizer.exp_avg.<FQN>", "optimizer.exp_avg_sq.<FQN>", "optimizer.step.<FQN>".
A name may be asked for on
several ranks with different meshes, as each pipeline stage has its own; nothing is ever gathered.
"""

import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshtrain.checkpoint.directory import (
    HUGGINGFACE_NAME,
    Manifest,
    checkpoint_directory,
    draft_directory,
    prune_checkpoints,
    publish_checkpoint,
    write_manifest,
)
from meshtrain.checkpoint.planner import BlockSavePlanner
from meshtrain.checkpoint.reading import find_damage, read_metadata, read_tensors, tensor_entries
from meshtrain.errors import CheckpointError, name_some
from meshtrain.runtime.agreement import gather_objects, is_first_rank, raise_together

MODEL_PREFIX = "model."
Description = tuple[tuple[int, ...], torch.dtype]


def save_checkpoint(
    root: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    *,
    manifest: Manifest,
    huggingface: Callable[[Path], None] | Path | None,
    keep: int,
) -> Path:
    """Write the checkpoint of a step, publish it, and remove old ones. Collective.

    Args:
        root: the directory of the run's checkpoints; every machine must see the same one.
        step: optimizer steps done.
        tensors: what lies on this rank; a DTensor is written shard by shard, copies of it once.
        manifest: of this step.
        huggingface: writes config and tokenizer into the directory it is given, or a directory to copy; rank 0 only.
        keep: how many of the newest checkpoints stay.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: the same on all ranks, if any of them could not write; no earlier checkpoint is touched.
    """
    assert manifest.step == step, f"the manifest is of step {manifest.step}, the checkpoint of {step}"
    final, draft = checkpoint_directory(root, step), draft_directory(root, step)
    outcome = f"step {step} is not saved and earlier checkpoints are untouched; make room, then resume"
    try:
        _on_first_rank(lambda: _start_draft(draft), f"cannot write {draft}", outcome)
        _write_tensors(draft, tensors, outcome)
        _on_first_rank(lambda: _finish_draft(draft, final, manifest, huggingface), f"cannot write {draft}", outcome)
    except CheckpointError:
        if is_first_rank():
            shutil.rmtree(draft, ignore_errors=True)
        raise
    kept = f"step {step} is saved, but the disk will fill up; remove them by hand, then resume"
    _on_first_rank(
        lambda: prune_checkpoints(root, step=step, keep=keep), f"cannot remove old checkpoints of {root}", kept
    )
    return final


def load_checkpoint(directory: Path, tensors: Mapping[str, Tensor], *, only: str | None = None) -> None:
    """Fill `tensors` in place from a checkpoint that was saved on any mesh. Collective.

    Args:
        directory: a checkpoint.
        tensors: what this rank wants; together the ranks must want exactly what the checkpoint holds, with the same
            shapes and dtypes (DCP itself would cast in silence and leave out what nobody wants).
        only: "model." to want only the names that start so.

    Raises:
        CheckpointError: the same on all ranks: files are missing or broken, or the tensors are others.
    """
    metadata, problems = _inspect(directory)
    raise_together(problems, CheckpointError)
    assert metadata is not None
    wanted = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    raise_together(_differences(directory, metadata, _merge(gather_objects(wanted)), only), CheckpointError)
    problems = []
    try:
        read_tensors(directory, metadata, tensors)
    except CheckpointError as error:
        problems = list(error.problems)
    raise_together(problems, CheckpointError)


class _Writer(FileSystemWriter):
    """DCP's writer, except that a full disk is called one.

    torch.save turns the OSError of the file below it into "RuntimeError: unexpected pos 704 vs 598". One thread: an
    error in a second one is lost, and the save counts as good.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, thread_count=1)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error.__context__
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror) from error
            raise


def _on_first_rank(work: Callable[[], None], failure: str, outcome: str) -> None:
    problems: Iterable[str] = ()
    if is_first_rank():
        try:
            work()
        except OSError as error:
            problems = [f"rank 0 {failure}: {error.strerror or error}; {outcome}"]
        except CheckpointError as error:
            problems = error.problems
    raise_together(problems, CheckpointError)


def _start_draft(draft: Path) -> None:
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)


def _write_tensors(draft: Path, tensors: Mapping[str, Tensor], outcome: str) -> None:
    alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(dict(tensors), storage_writer=_Writer(draft), planner=BlockSavePlanner(), no_dist=alone)
    except CheckpointException as error:
        ranks: dict[str, list[str]] = defaultdict(list)
        for rank, (cause, _) in error.failures.items():
            if isinstance(cause, OSError):
                ranks[cause.strerror or str(cause)].append(str(rank))
        if not ranks:
            raise
        raise CheckpointError(
            f"rank{'s' if len(who) > 1 else ''} {name_some(who)} cannot write {draft}: {reason}; {outcome}"
            for reason, who in ranks.items()
        ) from error


def _finish_draft(
    draft: Path, final: Path, manifest: Manifest, huggingface: Callable[[Path], None] | Path | None
) -> None:
    if damage := find_damage(draft, read_metadata(draft)):
        raise CheckpointError(
            f"{problem}, though its rank wrote it; put the run directory where every machine sees the same files"
            for problem in damage
        )
    if isinstance(huggingface, Path):
        shutil.copytree(huggingface, draft / HUGGINGFACE_NAME)
    elif huggingface is not None:
        (draft / HUGGINGFACE_NAME).mkdir()
        huggingface(draft / HUGGINGFACE_NAME)
    write_manifest(draft, manifest)
    publish_checkpoint(draft, final)


def _inspect(directory: Path) -> tuple[Metadata | None, list[str]]:
    try:
        metadata = read_metadata(directory)
    except CheckpointError as error:
        return None, list(error.problems)
    damage = find_damage(directory, metadata) if is_first_rank() else []
    return metadata, [f"{problem}; use another checkpoint" for problem in damage]


def _merge(answers: list[dict[str, Description]]) -> dict[str, Description]:
    merged: dict[str, Description] = {}
    for answer in answers:
        for key, description in answer.items():
            assert merged.setdefault(key, description) == description, f"ranks disagree on the shape or dtype of {key}"
    return merged


def _differences(directory: Path, metadata: Metadata, wanted: Mapping[str, Description], only: str | None) -> list[str]:
    """Return what keeps the checkpoint from being loaded into `wanted`, one line per kind."""
    saved = {
        key: (tuple(entry.size), entry.properties.dtype) for key, entry in tensor_entries(metadata, only or "").items()
    }
    missing = [key for key in wanted if key not in saved]
    unexpected = [key for key in saved if key not in wanted]
    both = [key for key in wanted if key in saved]
    shapes = [f"{key} {saved[key][0]} there, {wanted[key][0]} here" for key in both if saved[key][0] != wanted[key][0]]
    dtypes = [f"{key} {saved[key][1]} there, {wanted[key][1]} here" for key in both if saved[key][1] != wanted[key][1]]
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
            "it is a checkpoint of another model or optimizer: resume with its own, or begin another run directory"
        )
    return problems
