"""The loop: step, write down, evaluate, save."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain import console
from meshtrain.checkpoint.location import shown_location
from meshtrain.checkpoint.saver import Saver
from meshtrain.config.reading import shown
from meshtrain.config.run import RunConfig
from meshtrain.console import TrainingProgress
from meshtrain.data.loader import Batch
from meshtrain.data.order import place_in_data
from meshtrain.errors import CheckpointError, TrainingStopped, name_some
from meshtrain.runtime.agreement import gather_objects, raise_together
from meshtrain.runtime.signals import StopRequest, describe_reason
from meshtrain.training.directory import METRICS_NAME
from meshtrain.training.history import BadStep, name_samples
from meshtrain.training.metrics import MetricsWriter, memory_bytes
from meshtrain.training.step import Trainer, evaluate, train_step


@dataclass(frozen=True)
class Run:
    """A run that is ready to go.

    Attributes:
        first_step: steps done before.
        num_steps: steps to be done in all.
        epoch_of: place in the data, in batches from 0 -> epoch.
        train_batches: those of the remaining steps.
        evaluation_batches: source -> gives its validation data anew, of those that have any.
        save: writes the checkpoint of a step, given its evaluation loss if there is one.
        saver: what `save` writes with.
        rewind: goes back to the newest checkpoint, leaves out the batch of a bad step from there on, and returns the
            steps done before and the batches of the others.
        unigram_entropy: of the text, in nats: what a model reaches that knows token frequencies only.
        flops_per_token: of the model, forward and backward, for a sequence length.
        parameters_checksum: of the parameters that the first step finds; None without self-checks.
        stop: whether this process was asked to stop; what any was asked, all do.
    """

    config: RunConfig
    trainer: Trainer
    device: torch.device
    first_step: int
    num_steps: int
    epoch_of: Callable[[int], int]
    train_batches: Iterable[Batch]
    evaluation_batches: Mapping[str, Callable[[], Iterable[Batch]]]
    save: Callable[[int, float | None], None]
    saver: Saver
    rewind: Callable[[BadStep], tuple[int, Iterable[Batch]]]
    unigram_entropy: float
    flops_per_token: Callable[[int], float]
    parameters_checksum: str | None
    stop: StopRequest


def run_loop(run: Run) -> int:
    """Train to the last step; evaluate and save on the way and at the end.

    Returns:
        0 if the last step is done; otherwise why training was asked to stop, and has saved: `StopRequest.reason`.

    Raises:
        TrainingStopped: if a step is bad and the run shall not, may not or cannot go on; if the evaluation loss or what
            shall be saved is not finite.
        CheckpointError: if a checkpoint cannot be written, or none can be gone back to.
    """
    if run.first_step >= run.num_steps:
        console.line(f"Nothing to do: {run.first_step:,} of {run.num_steps:,} steps are done; raise `steps` to go on")
        return 0
    try:
        end = _train(run, None)
        while isinstance(end, BadStep):
            run.trainer.pipeline.place.begin("rewind")
            first_step, batches = run.rewind(end)
            run = replace(run, first_step=first_step, train_batches=batches, parameters_checksum=None)
            end = _train(run, end)
    except TrainingStopped as stopped:
        # On all processes alike, and what is being saved is good.
        _finish_saving(run, stopped)
        raise
    return end


def _finish_saving(run: Run, stopped: TrainingStopped) -> None:
    run.trainer.pipeline.place.begin("checkpoint")
    try:
        run.saver.finish()
    except CheckpointError as error:
        raise TrainingStopped([*stopped.problems, *error.problems]) from stopped
    for saved in run.saver.published():
        console.line(f"Saved {shown_location(saved.directory)}")


def _train(run: Run, rewound: BadStep | None) -> int | BadStep:
    """Train from the first step of `run` to the last, to where it is asked to stop, or to a step to be rewound."""
    evaluation_loss, place = None, run.trainer.pipeline.place
    with _open_metrics(run) as metrics:
        if rewound is not None:
            metrics.write_note(run.first_step, rewound.note("rewind", len(run.trainer.history.left_out)))
        if run.parameters_checksum is not None:
            metrics.write_note(run.first_step, {"parameters_checksum": run.parameters_checksum})
        for batch, data_seconds in _timed(run):
            step = batch.step + 1
            values, stop_reason, bad = _one_step(run, batch, data_seconds, metrics)
            if bad is not None and run.config.bad_steps.policy == "rewind":
                place.begin("checkpoint")
                run.saver.finish()
                _show_saved(run, metrics)
                return bad
            metrics.write(step, values)
            if bad is not None:
                _note_skipped(run, bad, metrics)
            place.end_step()
            if _next_epoch(run, step) != batch.epoch or step == run.num_steps:
                metrics.write_epoch(step)
            may_go_on, loss_here, is_saved = step < run.num_steps, None, False
            stop_reason = stop_reason if may_go_on else 0
            if not stop_reason:
                if run.evaluation_batches and _is_due(step, run.config.evaluation.every, run.num_steps):
                    evaluation_loss = loss_here = _evaluate(run, step, metrics)
                if is_saved := _is_due(step, run.config.checkpoint.every, run.num_steps):
                    _checkpoint(run, step, loss_here, metrics)
                if may_go_on and (is_saved or loss_here is not None):
                    # Both may take longer than whoever asks to stop has patience for another step.
                    stop_reason = _agreed_reason(run)
            if stop_reason:
                if not is_saved:
                    _checkpoint(run, step, loss_here, metrics)
                _stop(run, step, metrics, stop_reason)
                return stop_reason
        place.begin("checkpoint")
        run.saver.finish()
        _show_saved(run, metrics)
        _check_written(metrics)
    _show_end(run, evaluation_loss)
    return 0


def _open_metrics(run: Run) -> MetricsWriter:
    return MetricsWriter(
        Path(run.config.run_directory),
        first_step=run.first_step,
        progress=TrainingProgress(run.num_steps, every=run.config.logging.every),
        tensorboard=run.config.logging.tensorboard,
    )


def _timed(run: Run) -> Iterator[tuple[Batch, float]]:
    """Yield each batch with the seconds that were spent waiting for it."""
    iterator = iter(run.train_batches)
    for step in range(run.first_step, run.num_steps):
        run.trainer.pipeline.place.begin_step(step + 1)
        begin = time.perf_counter()
        batch = next(iterator)
        yield batch, time.perf_counter() - begin


def _on_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}


def _one_step(
    run: Run, batch: Batch, data_seconds: float, metrics: MetricsWriter
) -> tuple[dict[str, float], int, BadStep | None]:
    """Return the metrics of a step, why to stop after it, if any process was asked to, and what is bad about it."""
    begin = time.perf_counter()
    result = train_step(run.trainer, batch.step, _on_device(batch, run.device), batch.sample_ids)
    if batch.step == run.first_step:
        _show_without_gradient(result.without_gradient)
    _show_saved(run, metrics)
    run.trainer.pipeline.place.enter("metrics")
    state = [memory_bytes(run.device), metrics.problem is not None, run.saver.has_failed, run.stop.reason()]
    most = torch.tensor(state, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    memory, is_unwritten, is_unsaved, stop_reason = most.tolist()
    if is_unwritten:
        _check_written(metrics)
    if is_unsaved:
        run.saver.finish()
    seconds = data_seconds + time.perf_counter() - begin
    width = batch.tensors["labels"].shape[1]
    tokens_per_step = run.config.global_batch_size * width
    values = {
        "epoch": batch.epoch + 1,
        "loss": result.loss,
        "grad_norm": result.gradient_norm,
        "learning_rate": result.learning_rate,
        # Where batches are as wide as their longest sample, what came before cannot be told from the step.
        **({"tokens": (batch.step + 1) * tokens_per_step} if run.config.data.pad_to_multiple_of is None else {}),
        "trained_tokens": result.num_tokens,
        "tokens_per_second": tokens_per_step / seconds,
        "teraflops_per_second": run.flops_per_token(width) * tokens_per_step / seconds / dist.get_world_size() / 1e12,
        "memory_bytes": int(memory),
        "seconds": seconds,
        "data_seconds": data_seconds,
        "forward_backward_seconds": result.forward_backward_seconds,
        "optimizer_seconds": result.optimizer_seconds,
        **result.router,
        **result.scaling,
        **run.trainer.history.metrics(),
        **{f"samples/{source}": count for source, count in batch.source_samples.items()},
    }
    bad = None
    if result.fault is not None:
        bad = BadStep(batch.step + 1, batch.data_step, batch.sample_ids, result.fault)
    return values, int(stop_reason), bad


def _note_skipped(run: Run, bad: BadStep, metrics: MetricsWriter) -> None:
    num_bad = run.trainer.history.num_bad
    metrics.write_note(bad.step, bad.note("skip", num_bad))
    console.line(
        f"Step {bad.step:,} is bad, and skipped: {bad.fault}. Samples: {name_samples(bad.sample_ids)}. Skipped so far: "
        f"{num_bad:,}"
    )


def _next_epoch(run: Run, step: int) -> int:
    return run.epoch_of(place_in_data(step, run.trainer.history.left_out))


def _show_without_gradient(names: Iterable[str]) -> None:
    """Say which trainable parameters nothing trains; a mistake in a model or plan would show here. Collective."""
    if found := sorted({name for answer in gather_objects(tuple(names)) for name in answer}):
        console.line(f"No gradient in the first step, so not trained ({len(found)}): {name_some(found, 5)}")


def _check_written(metrics: MetricsWriter) -> None:
    """Stop all ranks if the first could not write its metrics. Collective."""
    advice = "training stopped; make room, then resume: it goes on from its newest checkpoint"
    raise_together([f"{metrics.problem}; {advice}"] if metrics.problem else [], TrainingStopped)


def _evaluate(run: Run, step: int, metrics: MetricsWriter) -> float:
    run.trainer.pipeline.place.begin("evaluation")
    begin = time.perf_counter()
    found = {
        name: evaluate(run.trainer, (_on_device(batch, run.device) for batch in batches()))
        for name, batches in run.evaluation_batches.items()
    }
    loss = sum(mean * count for mean, count in found.values()) / max(1, sum(count for _, count in found.values()))
    if not math.isfinite(loss):
        raise TrainingStopped(
            f"step {step}: the evaluation loss is {loss}, so the parameters are broken; stopped before a checkpoint of "
            "them was written. Lower optimizer.learning_rate, or set optimizer.max_gradient_norm"
        )
    of_each = {f"eval_loss/{name}": mean for name, (mean, _) in found.items()} if len(found) > 1 else {}
    metrics.write(step, {"eval_loss": loss, **of_each, "evaluation_seconds": time.perf_counter() - begin})
    return loss


def _agreed_reason(run: Run) -> int:
    """Return why any process was asked to stop; 0 if none was. Collective."""
    reason = torch.tensor(run.stop.reason())
    dist.all_reduce(reason, op=dist.ReduceOp.MAX)
    return int(reason)


def _stop(run: Run, step: int, metrics: MetricsWriter, reason: int) -> None:
    """Wait for what is being saved, and say how to go on."""
    run.saver.finish()
    _show_saved(run, metrics)
    _check_written(metrics)
    done = f"{step:,} of {run.num_steps:,} steps are done"
    console.line(f"Stopped by {describe_reason(reason)}: {done}; the same command goes on from there")


def _checkpoint(run: Run, step: int, evaluation_loss: float | None, metrics: MetricsWriter) -> None:
    run.trainer.pipeline.place.begin("checkpoint")
    begin = time.perf_counter()
    run.save(step, evaluation_loss)
    metrics.write(step, {"checkpoint_seconds": time.perf_counter() - begin})
    _show_saved(run, metrics)


def _show_saved(run: Run, metrics: MetricsWriter) -> None:
    """Tell of the checkpoints that were published since the last call."""
    for saved in run.saver.published():
        if run.config.checkpoint.in_background:
            metrics.write(saved.step, {"checkpoint_background_seconds": saved.seconds})
        console.line(f"Saved {shown_location(saved.directory)}")


def _is_due(step: int, every: int | None, num_steps: int) -> bool:
    return step == num_steps or (every is not None and step % every == 0)


def _show_end(run: Run, evaluation_loss: float | None) -> None:
    if evaluation_loss is not None:
        console.line(
            f"Validation loss {evaluation_loss:.3f} nats per token; the unigram entropy of the text is "
            f"{run.unigram_entropy:.3f}, which a model reaches that knows nothing but token frequencies"
        )
    console.line(f"Done. Metrics: {shown(Path(run.config.run_directory) / METRICS_NAME)}")
