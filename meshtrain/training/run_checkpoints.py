"""Checkpoints of a run: resume from one, save one, and go back to one after a bad step."""

import time
from pathlib import Path

from meshtrain import console
from meshtrain.checkpoint.manifest import Manifest, read_manifest
from meshtrain.checkpoint.storage.directory import MANIFEST_NAME
from meshtrain.checkpoint.storage.integrity import newest_intact_checkpoint
from meshtrain.checkpoint.storage.location import shown_location
from meshtrain.config.run import RunConfig
from meshtrain.data.samples.order import find_data_step
from meshtrain.errors import CheckpointError, DataError, ModelError, TrainingStopped
from meshtrain.models.build import local_directory
from meshtrain.models.initialize import restore_buffers
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.pretrained import load_pretrained
from meshtrain.runtime.agreement import failing_together
from meshtrain.runtime.location import Location
from meshtrain.training.beginning import begin_at_step_0
from meshtrain.training.build import Run
from meshtrain.training.directory import changed_length, checkpoints_root
from meshtrain.training.history import BadStep, name_samples
from meshtrain.training.identity import Identity
from meshtrain.training.schedule_free import weights_of_result
from meshtrain.training.state import load_weights_of, restore_snapshot, take_snapshot

Found = tuple[Location, Manifest]
"""A checkpoint and its manifest."""


def find_checkpoint_to_resume(identity: Identity) -> Found | None:
    """Return the newest intact checkpoint of the run; None if the run never saved one. Collective.

    Raises:
        CheckpointError: the same on all processes: no checkpoint is intact, it belongs to another
            run, or the saved checkpoints are missing.
    """
    checkpoint = newest_intact_checkpoint(checkpoints_root(identity.config))
    if checkpoint is None:
        begin_at_step_0(identity.config)
        return None
    with failing_together(CheckpointError):
        manifest = identity.check(checkpoint)
    return checkpoint, manifest


def set_values(run: Run, found: Found | None) -> None:
    """Set the values of the parameters, and the number of steps already done. Collective.

    Args:
        found: the checkpoint to resume from; None: the run begins.
    """
    if found is None:
        give_first_values(run)
        if run.average is not None:
            run.average.begin()
        return
    checkpoint, manifest = found
    if run.base.exists:
        give_first_values(run)
        run.base.check(checkpoint, manifest)
    else:
        _restore_buffers(run.pipeline)
    _restore(run, checkpoint, manifest)
    run.dataset.check_steps(run.num_steps, len(run.context.history.left_out))
    console.line(f"Resumed from {shown_location(checkpoint)}: step {manifest.step:,} done")
    if change := changed_length(run.config):
        console.line(f"{change}; the learning rate follows its schedule over the new length")


def give_first_values(run: Run) -> None:
    """Set the parameters to what the run starts from. Collective."""
    config, pipeline = run.config, run.pipeline
    if config.model.weights == "pretrained":
        _load_pretrained(config, pipeline)
        pipeline.initialize_adapters(config.seed)
        run.base.read(pipeline)
        return
    pipeline.initialize(config.seed)


def save(run: Run, step: int, evaluation_loss: float | None) -> None:
    """Save a checkpoint and notify the hooks, unless the run keeps none. Collective.

    Args:
        evaluation_loss: loss after this step, in nats per token; None if there was no evaluation.

    Raises:
        TrainingStopped: the same on all ranks: the state is not finite, or another run has taken
            over the folders.
        CheckpointError: the same on all ranks: this checkpoint, or the one before it, cannot be
            written.
    """
    if run.config.checkpoint.keep == 0:
        return
    run.pipeline.activity.begin("checkpoint")
    begin = time.perf_counter()
    # All ranks have now finished the previous save, so all of them can notify their hooks.
    run.saver.finish()
    notify_of_saved(run)
    run.lock.check()
    with weights_of_result(run.context.optimizer):
        _begin_to_save(run, step, evaluation_loss)
    metrics = {"checkpoint_seconds": time.perf_counter() - begin}
    if run.config.checkpoint.in_background:
        run.hooks.checkpoint(metrics, None)
    else:
        (saved,) = run.saver.published()
        run.hooks.checkpoint(metrics, saved)


def _begin_to_save(run: Run, step: int, evaluation_loss: float | None) -> None:
    """Write a checkpoint, or copy what is written in the background."""
    tensors, manifest = take_snapshot(run.pipeline, run.state, run.average)
    history = run.context.history
    own = {
        "skipped_steps": history.num_skipped,
        "loss_scale": run.context.loss_scale.saved(),
        "history": history.saved(),
        "noise": run.context.noise_scale.saved(),
        "streams": run.dataset.stream_state(find_data_step(step, history.left_out)),
        "evaluation_loss": evaluation_loss,
        "base": run.base.saved(),
        "reference": run.reference,
        "teacher": run.teacher,
    }
    manifest = manifest.model_copy(update=run.identity.manifest_fields() | own)
    run.saver.save(tensors, manifest, run.identity.write_huggingface)


def finish_saving(run: Run) -> None:
    """Wait for the save in the background, and notify the hooks. Collective."""
    run.pipeline.activity.begin("checkpoint")
    run.saver.finish()
    notify_of_saved(run)


def notify_of_saved(run: Run, *, at_most: int | None = None) -> None:
    """Notify the hooks of the checkpoints published in the background since the last call.

    Args:
        at_most: the number that all ranks know of, so that all ranks report the same ones.
    """
    for saved in run.saver.published(at_most):
        run.hooks.checkpoint({"checkpoint_background_seconds": saved.seconds}, saved)


def rewind(run: Run, bad: BadStep) -> None:
    """Go back to the newest intact checkpoint, and leave out the batch of a bad step. Collective.

    Raises:
        TrainingStopped: if there is no checkpoint yet, or too little data without that batch.
        CheckpointError: if no checkpoint is intact.
    """
    history = run.context.history
    # The checkpoint may be older than an earlier rewind, and may lack what that rewind left out.
    left_out = tuple(sorted({*history.left_out, bad.data_step}))
    # `identity.check` is not needed: the run wrote the checkpoint, or checked it at the start.
    checkpoint = newest_intact_checkpoint(checkpoints_root(run.config))
    if checkpoint is None:
        raise TrainingStopped(
            f"step {bad.step}: {bad.fault}; there is no checkpoint yet to go back to. Samples of this step: "
            f"{name_samples(bad.sample_ids)}",
            'look at them, lower optimizer.learning_rate or checkpoint.every, or set bad_steps.policy to "skip"',
        )
    try:
        run.dataset.check_steps(run.num_steps, len(left_out))
    except DataError as error:
        raise TrainingStopped(
            [f"step {bad.step}: {bad.fault}; this batch cannot be left out", *error.problems]
        ) from error
    _restore(run, checkpoint, read_manifest(checkpoint))
    history.left_out = left_out
    console.line(
        f"Step {bad.step:,} is bad: {bad.fault}. The run goes back to {shown_location(checkpoint)}, and continues "
        f"without the samples of that step: {name_samples(bad.sample_ids)}. Batches left out so far: {len(left_out)}"
    )


def _restore(run: Run, checkpoint: Location, manifest: Manifest) -> None:
    restore_snapshot(checkpoint, manifest, run.pipeline, run.state, average=run.average)
    run.context.loss_scale.restore(manifest.loss_scale)
    run.context.noise_scale.restore(manifest.noise)
    run.context.history.restore(manifest.history, manifest.skipped_steps)
    # A rewind may go further back than the streams remember, so the checkpoint has their state.
    run.dataset.restore_streams(manifest.streams)


def _load_pretrained(config: RunConfig, pipeline: Pipeline) -> None:
    assert config.model.path is not None
    enlarges = config.model.enlarge_vocabulary
    if not (Path(config.model.path) / MANIFEST_NAME).is_file():
        load_pretrained(pipeline, local_directory(config.model.path), enlarge_vocabulary=enlarges)
        return
    if enlarges:
        raise ModelError(
            f"model.enlarge_vocabulary = true, but {config.model.path} is a checkpoint",
            "export it, and set model.path to the exported directory",
        )
    _restore_buffers(pipeline)
    load_weights_of(Path(config.model.path), pipeline)


def _restore_buffers(pipeline: Pipeline) -> None:
    for stage in pipeline.stages:
        restore_buffers(stage.model)
