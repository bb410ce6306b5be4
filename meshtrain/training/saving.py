"""Checkpoints of a program with its own loop, in the same format as those of a run."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from meshtrain.checkpoint.dcp.reading import tensor_entries
from meshtrain.checkpoint.dcp.store import read_table, write_checkpoint
from meshtrain.checkpoint.huggingface.description import write_description
from meshtrain.checkpoint.huggingface.pretrained import original_dtype
from meshtrain.checkpoint.manifest import FormatError, Manifest, SavedOptimizer, read_manifest
from meshtrain.checkpoint.storage.directory import USE_ANOTHER, is_checkpoint, step_of
from meshtrain.checkpoint.storage.integrity import agreed_checkpoints, find_damage, newest_intact_checkpoint
from meshtrain.checkpoint.storage.named_folder import locked_together
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.config.optimizer import OPTIMIZERS
from meshtrain.errors import CheckpointError, Problem
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.agreement import failing_together, gather_objects, raise_together
from meshtrain.runtime.location import Location
from meshtrain.training.optimizer_state import OPTIMIZER_PREFIX
from meshtrain.training.same_model import check_same_model
from meshtrain.training.saved_optimizer import describe_optimizer, optimizer_problems, restore_options
from meshtrain.training.state import TrainState, restore_snapshot, take_snapshot


def save_state(
    root: Location,
    pipeline: Pipeline,
    state: TrainState,
    *,
    keep: int,
    origin: Path | None = None,
    forward_passes: int = 0,
) -> Location:
    """Write a checkpoint of `state.step` under `root`. Collective.

    Args:
        pipeline: the pipeline of `state.model`.
        keep: number of newest checkpoints to keep.
        origin: the directory that the model came from, with its tokenizer; None: what the model's
            configuration names.
        forward_passes: number of training passes so far.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: the same on all processes: the checkpoint cannot be written, another
            program writes there, there is a checkpoint of a later step, or the state has something
            that a checkpoint cannot hold.
        TrainingStopped: the same on all processes: a value is not finite.
    """
    too_few = Problem(f"keep = {keep}: the checkpoint that is written must stay", "pass 1 or more")
    raise_together([too_few] if keep < 1 else [], CheckpointError)
    optimizer = None if state.optimizer is None else describe_optimizer(pipeline, state.optimizer)
    with locked_together(root):
        tensors, manifest = take_snapshot(pipeline, state)
        _check_nothing_is_later(root, manifest.step)
        manifest = manifest.model_copy(update={"optimizer": optimizer, "forward_passes": forward_passes})
        description = partial(
            write_description,
            model=pipeline.stages[0].model,
            tokenizer=None,
            dtype=original_dtype(pipeline),
            origin=origin,
        )
        return write_checkpoint(
            root, tensors, manifest=manifest, huggingface=description, retention=Retention(newest=keep)
        )


def restore_state(where: Location, pipeline: Pipeline, state: TrainState, *, missing_ok: bool) -> Manifest | None:
    """Fill `state` in place from a checkpoint that was saved on any mesh. Collective.

    Args:
        where: a checkpoint, or the directory above; there the newest intact checkpoint is used.
        pipeline: the pipeline of `state.model`.
        missing_ok: leave the state as it is if there is no checkpoint yet.

    Returns:
        The manifest of the checkpoint; None if there is none.

    Raises:
        CheckpointError: the same on all processes: there is no checkpoint, it is damaged, or it
            holds something else.
    """
    checkpoint = _find(where)
    if checkpoint is None:
        if missing_ok:
            return None
        raise CheckpointError(
            f"{where} has no checkpoint: no step-N directory with a manifest",
            "pass another directory, or missing_ok=True",
        )
    manifest = _read_manifest(checkpoint)
    check_same_model(checkpoint, manifest, pipeline.stages[0].model.config)
    here = None if state.optimizer is None else describe_optimizer(pipeline, state.optimizer)
    there = manifest.optimizer
    if there is None and tensor_entries(read_table(checkpoint), OPTIMIZER_PREFIX):
        # The checkpoint belongs to a run. Its options are in the run file, and any groups fit.
        name = OPTIMIZERS[manifest.optimizer_name].class_name
        there = SavedOptimizer(name=name, groups=() if here is None else here.groups)
    if problems := _optimizer_problems(there, here):
        raise CheckpointError(problem.concerning(str(checkpoint)) for problem in problems)
    restore_snapshot(checkpoint, manifest, pipeline, state, there)
    if state.optimizer is not None and manifest.optimizer is not None:
        restore_options(state.optimizer, manifest.optimizer)
    return manifest


def _find(where: Location) -> Location | None:
    answer: tuple[bool, tuple[Problem, ...]] = (False, ())
    try:
        answer = (is_checkpoint(where), ())
    except CheckpointError as error:
        answer = (False, error.problems)
    # Not all machines may see the checkpoint at the same time, so the first rank decides.
    is_one, problems = gather_objects(answer)[0]
    if problems:
        raise CheckpointError(problems)
    if not is_one:
        return newest_intact_checkpoint(where)
    if damage := find_damage(where):
        raise CheckpointError(replace(problem, advice=USE_ANOTHER) for problem in damage)
    return where


def _read_manifest(checkpoint: Location) -> Manifest:
    with failing_together(CheckpointError, except_for=(FormatError,)):
        return read_manifest(checkpoint)


def _check_nothing_is_later(root: Location, step: int) -> None:
    """Check that a restart would continue from the checkpoint to be saved. Collective.

    Raises:
        CheckpointError: if there is an intact checkpoint of a later step.
    """
    for later in [path for path in agreed_checkpoints(root) if step_of(path) > step]:
        if not find_damage(later):
            raise CheckpointError(
                f"step {step} is to be saved, but {later} is later, and a restart would continue from there",
                "remove later checkpoints, or save into another directory",
            )


def _optimizer_problems(there: SavedOptimizer | None, here: SavedOptimizer | None) -> list[Problem]:
    if there is not None and here is not None:
        return optimizer_problems(there, here)
    if there is None and here is None:
        return []
    advice = "use the same optimizer, or load the weights alone with load_weights"
    if here is None:
        assert there is not None
        return [Problem(f"it holds state of {there.name}, and the state to load has no optimizer", advice)]
    return [Problem(f"it holds no optimizer state, and the state to load has {here.name}", advice)]
