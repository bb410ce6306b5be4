"""A training run from its configuration to its end: the one path."""

import json
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache, partial
from pathlib import Path
from signal import SIGTERM
from typing import Any

from meshtrain import console
from meshtrain.checkpoint.directory import MANIFEST_NAME
from meshtrain.checkpoint.integrity import newest_whole_checkpoint
from meshtrain.checkpoint.location import Location, shown_location
from meshtrain.checkpoint.manifest import Manifest, read_manifest
from meshtrain.checkpoint.publishing import Retention
from meshtrain.checkpoint.saver import Saver
from meshtrain.config.mesh import DATA_AXES
from meshtrain.config.reading import shown
from meshtrain.config.run import RunConfig, duration_seconds
from meshtrain.data.feed import Feed, build_feed
from meshtrain.data.loader import Batch, build_loader
from meshtrain.data.order import place_in_data
from meshtrain.data.prepare import PreparedData, prepare_data
from meshtrain.errors import CheckpointError, ConfigError, DataError, ModelError, TrainingStopped, name_some
from meshtrain.models.build import local_directory
from meshtrain.models.initialize import initialize_weights, restore_buffers
from meshtrain.parallel import parallelize
from meshtrain.parallel.account import account, flops_per_token
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.pretrained import load_pretrained
from meshtrain.runtime.agreement import failing_together, gather_objects, raise_together
from meshtrain.runtime.environment import rank_from_environment, world_size_from_environment
from meshtrain.runtime.mesh import axis_size, build_mesh, data_rank
from meshtrain.runtime.place import Limits
from meshtrain.runtime.process import Process, check_devices, lift_timeouts, run_process
from meshtrain.training.beginning import begin_at_step_0
from meshtrain.training.directory import changed_length, check_directory, checkpoints_root, write_resolved
from meshtrain.training.history import BadStep, StepHistory, name_samples
from meshtrain.training.hooks import Hook, Hooks, RunState
from meshtrain.training.identity import Identity
from meshtrain.training.lock import RunLock, locked_run
from meshtrain.training.logging_hooks import LinesHook, MetricsHook
from meshtrain.training.loop import Run, run_loop
from meshtrain.training.loss import build_loss
from meshtrain.training.loss_scale import build_loss_scale
from meshtrain.training.optim import build_learning_rate, build_optimizer
from meshtrain.training.report import (
    Resolved,
    batch_equation,
    batch_shape,
    check_vocabulary,
    hf_config_of,
    resolve_run,
    show_plan_table,
    show_shares,
)
from meshtrain.training.saving import agreed_step_and_values
from meshtrain.training.self_check import FirstStepCheck, check_parameters
from meshtrain.training.state import check_finite, load_state, load_weights_of, saved_tensors
from meshtrain.training.step import StepContext, no_inspection

Found = tuple[Location, Manifest]
"""A checkpoint and what it says of itself."""


class Ending(Enum):
    """How a run ends that does not fail."""

    DONE = "all steps are done"
    ASKED = "this process, or all, should stop, and has saved"
    FOLLOWED = "another process has to go, and all have saved"


def train(config: RunConfig, hooks: Sequence[Hook] = ()) -> Ending:
    """Train a run, or go on with it where its newest checkpoint is.

    Args:
        hooks: are told what happens, after the built-in ones; on every rank.

    Raises:
        UserError: before any process group is joined, wherever the mistake can be known there.
    """
    started = time.monotonic()
    check_devices()
    check_directory(config)
    with locked_run(config) as lock:
        return _train(config, hooks, lock, started)


def _train(config: RunConfig, hooks: Sequence[Hook], lock: RunLock, started: float) -> Ending:
    resolved = resolve_run(config, world_size_from_environment())
    data = prepare_data(config.data, leads=rank_from_environment() == 0)
    check_vocabulary(data.tokenizer.vocab_size, resolved.hf_config)
    feed = build_feed(data, global_batch_size=config.global_batch_size, seed=config.seed)
    num_steps = _num_steps(config, feed)
    build_learning_rate(config.learning_rate, config.optimizer.learning_rate, num_steps)
    hf_config = hf_config_of(config, end_id=data.tokenizer.end_id)
    identity = Identity(config, data, resolved, hf_config)
    with run_process(Path(config.run_directory), Limits(**config.watchdog.model_dump())) as process:
        if config.stop_after is not None:
            process.stop.deadline = started + duration_seconds(config.stop_after)
        _agree_on_data(data)
        found = _find_checkpoint(identity)
        _show_head(config, resolved, num_steps)
        reason = run_loop(lock.checking(_build(identity, feed, num_steps, found, process, (lock, *hooks))))
        if reason == 0:
            return Ending.DONE
        # SIGUSR1 is what a person wants of the run. SIGTERM is what a machine is told that has to go, or torchrun that
        # has other machines to meet: the others have to meet again, not to end.
        return Ending.FOLLOWED if reason == SIGTERM and not process.stop.is_asked() else Ending.ASKED


def _find_checkpoint(identity: Identity) -> Found | None:
    """Return the newest whole checkpoint of the run, if there is one. Collective.

    Raises:
        CheckpointError: the same on all processes: none is whole, it is of another run, or it is gone.
    """
    checkpoint = newest_whole_checkpoint(checkpoints_root(identity.config))
    if checkpoint is None:
        begin_at_step_0(identity.config)
        return None
    with failing_together(CheckpointError):
        manifest = identity.check(checkpoint)
    return checkpoint, manifest


def _build(
    identity: Identity,
    feed: Feed,
    num_steps: int,
    found: Found | None,
    process: Process,
    hooks: Sequence[Hook],
) -> Run:
    config, data, resolved = identity.config, identity.data, identity.resolved
    mesh = build_mesh(resolved.plan.mesh, process.device.type)
    if resolved.plan.shard.offload == "cpu" and process.device.type == "cpu":
        console.line("shard.offload = 'cpu' changes nothing: without an accelerator all is in host memory anyway")
    pipeline = parallelize(
        resolved.model,
        mesh,
        resolved.plan,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        device=process.device,
    )
    context = StepContext(
        pipeline=pipeline,
        loss=build_loss(pipeline),
        optimizer=build_optimizer(pipeline, config.optimizer),
        learning_rate=build_learning_rate(config.learning_rate, config.optimizer.learning_rate, num_steps),
        max_gradient_norm=config.optimizer.max_gradient_norm,
        loss_scale=build_loss_scale(resolved.plan.precision),
        history=StepHistory(config.bad_steps),
        inspect=FirstStepCheck(pipeline) if config.self_checks else no_inspection,
    )
    state = RunState(
        model=pipeline,
        optimizer=context.optimizer,
        config=config.model_copy(update={"plan": resolved.plan}),
        num_steps=num_steps,
        unigram_entropy=data.unigram_entropy_nats,
        stop=process.stop,
    )
    _begin(state, context, feed, found)
    report = check_parameters(pipeline) if config.self_checks else None
    if report is not None:
        copies = f"; in two stages, because tied: {name_some(report.tied_copies)}" if report.tied_copies else ""
        console.line(f"Parameters checksum {report.checksum}{copies}")
    _write_resolved(config, resolved, process)
    kept = config.checkpoint
    saver = Saver(
        checkpoints_root(config),
        Retention(newest=kept.keep, every=kept.keep_every, best=kept.keep_best),
        in_background=kept.in_background,
    )
    process.guard.follow(pipeline.place)
    lift_timeouts()
    batches = partial(_train_batches, feed, context, process, num_steps)
    return Run(
        config=config,
        context=context,
        device=process.device,
        hooks=Hooks(state, (MetricsHook(), LinesHook(), *hooks)),
        first_step=state.step,
        num_steps=num_steps,
        epoch_of=feed.order.epoch,
        train_batches=batches(state.step),
        evaluation_batches=_evaluation_batches(config, feed, pipeline, process),
        save=partial(_save, identity, feed, context, saver, state),
        saver=saver,
        rewind=partial(_rewind, identity, feed, context, state, batches),
        flops_per_token=cache(partial(flops_per_token, resolved.model)),
        parameters_checksum=report.checksum if report is not None else None,
    )


def _agree_on_data(data: PreparedData) -> None:
    """Compare what the processes have read. Collective.

    Raises:
        DataError: if a machine has other text, or another tokenizer, than the first process.
    """
    answers = gather_objects((socket.gethostname(), data.identity))
    others = sorted({host for host, identity in answers if identity != answers[0][1]})
    problem = (
        f"the data of {name_some(others)} is not that of {answers[0][0]}: text, tokenizer or Python version differs; "
        "give all machines the same files"
    )
    raise_together([problem] if others else [], DataError)


def _begin(state: RunState, context: StepContext, feed: Feed, found: Found | None) -> None:
    """Give the parameters their values, and the state the number of steps already done."""
    pipeline, config = context.pipeline, state.config
    if found is not None:
        checkpoint, manifest = found
        for stage in pipeline.stages:
            restore_buffers(stage.model)
        _restore(state, context, checkpoint, manifest)
        feed.restore_streams(manifest.streams)
        feed.check_steps(state.num_steps, len(context.history.left_out))
        console.line(f"Resumed from {shown_location(checkpoint)}: step {manifest.step:,} done")
        if change := changed_length(config):
            console.line(f"{change}; the learning rate follows its schedule over the new length")
        return
    if config.model.weights == "pretrained":
        _load_pretrained(config, pipeline)
    else:
        for stage in pipeline.stages:
            initialize_weights(stage.model, seed=config.seed, names=pipeline.canonical_names())


def _restore(state: RunState, context: StepContext, checkpoint: Location, manifest: Manifest) -> None:
    load_state(checkpoint, context.pipeline, context.optimizer)
    context.pipeline.longest.restore(manifest.rotary_length)
    context.loss_scale.restore(manifest.loss_scale)
    context.history.restore(manifest.history, manifest.skipped_steps)
    state.step, state.values = manifest.step, json.loads(manifest.values)


def _rewind(
    identity: Identity,
    feed: Feed,
    context: StepContext,
    state: RunState,
    batches: Callable[[int], Iterable[Batch]],
    bad: BadStep,
) -> tuple[int, Iterable[Batch]]:
    """Go back to the newest whole checkpoint, and on without the batch of a bad step. Collective.

    Returns:
        The steps done before, and the batches of the others.

    Raises:
        TrainingStopped: if there is no checkpoint yet, or too little data without that batch.
        CheckpointError: if none is whole.
    """
    # What one rewind has left out before, the checkpoint need not know: it may be older.
    left_out = tuple(sorted({*context.history.left_out, bad.data_step}))
    # Not `identity.check`: the run wrote it itself, or has checked it when it began.
    checkpoint = newest_whole_checkpoint(checkpoints_root(identity.config))
    if checkpoint is None:
        raise TrainingStopped(
            f"step {bad.step}: {bad.fault}; there is no checkpoint yet to go back to. Samples of this step: "
            f"{name_samples(bad.sample_ids)}. Look at them, lower optimizer.learning_rate or checkpoint.every, or set "
            'bad_steps.policy to "skip"'
        )
    try:
        feed.check_steps(state.num_steps, len(left_out))
    except DataError as error:
        raise TrainingStopped([f"step {bad.step}: {bad.fault}; it cannot be left out", *error.problems]) from error
    manifest = read_manifest(checkpoint)
    _restore(state, context, checkpoint, manifest)
    # The place may be so long ago that the streams have forgotten it.
    feed.restore_streams(manifest.streams)
    context.history.left_out = left_out
    console.line(
        f"Step {bad.step:,} is bad: {bad.fault}. Back to {shown_location(checkpoint)}, and on without the samples of "
        f"that step: {name_samples(bad.sample_ids)}. Batches left out so far: {len(left_out)}"
    )
    return manifest.step, batches(manifest.step)


def _write_resolved(config: RunConfig, resolved: Resolved, process: Process) -> None:
    with failing_together(ConfigError):
        if process.rank == 0:
            try:
                write_resolved(config, resolved.plan)
            except OSError as error:
                raise ConfigError(
                    f"cannot write into {config.run_directory}: {error.strerror}; make room, or set run_directory to "
                    "another place"
                ) from error


def _load_pretrained(config: RunConfig, pipeline: Pipeline) -> None:
    assert config.model.path is not None
    if (Path(config.model.path) / MANIFEST_NAME).is_file():
        if config.model.enlarge_vocabulary:
            raise ModelError(
                f"model.enlarge_vocabulary = true, but {config.model.path} is a checkpoint; export it, and give the "
                "Hugging Face directory that comes of it as model.path"
            )
        for stage in pipeline.stages:
            restore_buffers(stage.model)
        load_weights_of(Path(config.model.path), pipeline)
        return
    folder = local_directory(config.model.path)
    load_pretrained(pipeline, folder, enlarge_vocabulary=config.model.enlarge_vocabulary)


def _save(
    identity: Identity,
    feed: Feed,
    context: StepContext,
    saver: Saver,
    state: RunState,
    step: int,
    evaluation_loss: float | None,
) -> None:
    _, values = agreed_step_and_values(state)
    tensors = saved_tensors(context.pipeline, context.optimizer)
    check_finite(step, tensors)
    streams = feed.stream_state(place_in_data(step, context.history.left_out))
    manifest = identity.manifest(
        step, context.pipeline.fused, context.loss_scale, context.history, evaluation_loss, streams
    ).model_copy(update={"values": values, "rotary_length": context.pipeline.longest.grown()})
    saver.save(tensors, manifest, identity.write_huggingface)


def _train_batches(
    feed: Feed, context: StepContext, process: Process, num_steps: int, first_step: int
) -> Iterable[Batch]:
    return build_loader(
        feed.samples,
        feed.order,
        start_step=first_step,
        stop_step=num_steps,
        left_out=context.history.left_out,
        **_share(context.pipeline, process),
    )


def _evaluation_batches(
    config: RunConfig, feed: Feed, pipeline: Pipeline, process: Process
) -> dict[str, Callable[[], Iterable[Batch]]]:
    batches: dict[str, Callable[[], Iterable[Batch]]] = {}
    for name, (samples, order) in feed.validation.items():
        num_batches = min(order.steps_per_epoch, config.evaluation.max_batches or order.steps_per_epoch)
        share = _share(pipeline, process)
        batches[name] = partial(build_loader, samples, order, start_step=0, stop_step=num_batches, **share)
    return batches


def _share(pipeline: Pipeline, process: Process) -> dict[str, Any]:
    """Return which part of a global batch this process reads."""
    return {
        "dp_rank": data_rank(pipeline.mesh),
        "dp_size": axis_size(pipeline.mesh, *DATA_AXES),
        # What lies between the embedding and the head has no use for tokens.
        "with_tokens": pipeline.has_first_stage or pipeline.has_last_stage,
        "pin_memory": process.device.type == "cuda",
    }


def _num_steps(config: RunConfig, feed: Feed) -> int:
    """Return the length of the run.

    Raises:
        ConfigError: if it is given in epochs and there are none.
        DataError: if the data ends before.
    """
    if config.epochs is None:
        assert config.steps is not None
        feed.check_steps(config.steps)
        return config.steps
    if feed.order.steps_per_epoch is None:
        raise ConfigError(f"`epochs` = {config.epochs}, but a mixture has none, each source has its own; give `steps`")
    if feed.streams:
        raise ConfigError(
            f"`epochs` = {config.epochs}, but data.streaming: where a stream ends is not known before; give `steps`"
        )
    return config.epochs * feed.order.steps_per_epoch


def _show_head(config: RunConfig, resolved: Resolved, num_steps: int) -> None:
    show_plan_table(resolved)
    show_shares(account(resolved.model, resolved.plan))
    console.line(batch_equation(resolved.plan, batch_shape(config)))
    console.line(f"{num_steps:,} steps into {shown(Path(config.run_directory))}")
