"""The teacher of a run that is built: its weights come from its folder at every start."""

from dataclasses import replace
from pathlib import Path

from meshtrain import console
from meshtrain.checkpoint.manifest import Manifest, SavedTeacher
from meshtrain.checkpoint.storage.location import shown_location
from meshtrain.errors import CheckpointError
from meshtrain.models.build import local_directory
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.pretrained import load_pretrained
from meshtrain.runtime.location import Location
from meshtrain.training.build import Run
from meshtrain.training.distillation.loss import DistillationLoss
from meshtrain.training.distillation.teacher import ASKED
from meshtrain.training.self_check import frozen_checksum


def with_teacher(run: Run, found: tuple[Location, Manifest] | None) -> Run:
    """Return a run whose teacher has its weights, if it has a teacher. Collective.

    Args:
        run: that is built.
        found: the checkpoint that it resumes from, with its manifest; None: the run begins.

    Raises:
        UserError: as `load_teacher`.
    """
    loss, folder = run.context.loss, run.config.distillation.teacher
    if folder is None:
        if found is not None and found[1].teacher is not None:
            console.line(
                f"{shown_location(found[0])} was saved by a run with the teacher {found[1].teacher.path}, and this run "
                "goes on without one"
            )
        return run
    assert isinstance(loss, DistillationLoss), "the run learns from a teacher"
    return replace(run, teacher=load_teacher(loss.teacher.pipeline, folder, found))


def load_teacher(pipeline: Pipeline, folder: str, found: tuple[Location, Manifest] | None) -> SavedTeacher:
    """Fill a teacher from its folder, and return what a checkpoint says about it. Collective.

    Args:
        pipeline: of the teacher.
        folder: that it comes from.
        found: as for `with_teacher`.

    Raises:
        ModelError: if the folder has no such weights.
        CheckpointError: if the run began with other weights, or without a teacher.
    """
    load_pretrained(pipeline, local_directory(Path(folder), asked=ASKED))
    number_format = pipeline.plan.precision.parameters
    loaded = SavedTeacher(path=folder, dtype=number_format, checksum=frozen_checksum(pipeline))
    if found is not None:
        _check(found, loaded)
    return loaded


def _check(found: tuple[Location, Manifest], loaded: SavedTeacher) -> None:
    checkpoint, manifest = found
    saved = manifest.teacher
    if saved is None:
        raise CheckpointError(
            f"{shown_location(checkpoint)}: it was saved by a run without a teacher, and distillation.teacher = "
            f"{loaded.path!r} changes the loss",
            "leave distillation.teacher out, or begin a new run from its weights in a directory of its own",
        )
    if saved.dtype != loaded.dtype:
        console.line(
            f"The weights of the teacher are not compared with those at the start, which were in {saved.dtype}, "
            f"because they are in {loaded.dtype} now"
        )
    elif saved.checksum != loaded.checksum:
        raise CheckpointError(
            f"{shown_location(checkpoint)}: its teacher had other weights than those in {loaded.path} (their checksum "
            f"was {saved.checksum}, and is {loaded.checksum})",
            "put back the model that was there then",
        )
