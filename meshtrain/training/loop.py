"""The loop: step, write down, evaluate, save."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain import console
from meshtrain.checkpoint.place import shown_place
from meshtrain.checkpoint.saver import Saver
from meshtrain.config.reading import shown
from meshtrain.config.run import RunConfig
from meshtrain.console import TrainingProgress
from meshtrain.data.loader import Batch
from meshtrain.errors import TrainingStopped, name_some
from meshtrain.runtime.agreement import gather_objects, raise_together
from meshtrain.training.directory import METRICS_NAME
from meshtrain.training.metrics import MetricsWriter, memory_bytes
from meshtrain.training.step import Trainer, evaluate, train_step


@dataclass(frozen=True)
class Run:
    """A run that is ready to go.

    Attributes:
        first_step: steps done before.
        num_steps: steps to be done in all.
        train_batches: those of the remaining steps.
        evaluation_batches: gives the validation data anew; None without any.
        save: writes the checkpoint of a step, given its evaluation loss if there is one.
        saver: what `save` writes with.
        unigram_entropy: of the text, in nats: what a model reaches that knows token frequencies only.
        flops_per_token: of the model, forward and backward.
        parameters_checksum: of the parameters that the first step finds; None without self-checks.
    """

    config: RunConfig
    trainer: Trainer
    device: torch.device
    first_step: int
    num_steps: int
    steps_per_epoch: int
    train_batches: Iterable[Batch]
    evaluation_batches: Callable[[], Iterable[Batch]] | None
    save: Callable[[int, float | None], None]
    saver: Saver
    unigram_entropy: float
    flops_per_token: float
    parameters_checksum: str | None


def run_loop(run: Run) -> None:
    """Train to the last step; evaluate and save on the way and at the end.

    Raises:
        TrainingStopped: if loss or gradient is not finite.
        CheckpointError: if a checkpoint cannot be written.
    """
    if run.first_step >= run.num_steps:
        console.line(f"Nothing to do: {run.first_step:,} of {run.num_steps:,} steps are done; raise `steps` to go on")
        return
    evaluation_loss, evaluated = None, 0
    with _open_metrics(run) as metrics:
        if run.parameters_checksum is not None:
            metrics.write_text(run.first_step, "parameters_checksum", run.parameters_checksum)
        for batch, data_seconds in _timed(run.train_batches):
            step = batch.step + 1
            metrics.write(step, _one_step(run, batch, data_seconds, metrics))
            if step % run.steps_per_epoch == 0 or step == run.num_steps:
                metrics.write_epoch(step)
            if run.evaluation_batches is not None and _is_due(step, run.config.evaluation.every, run.num_steps):
                evaluation_loss, evaluated = _evaluate(run, step, metrics), step
            if _is_due(step, run.config.checkpoint.every, run.num_steps):
                _checkpoint(run, step, evaluation_loss if evaluated == step else None, metrics)
        run.saver.finish()
        _show_saved(run, metrics)
        _check_written(metrics)
    _show_end(run, evaluation_loss)


def _open_metrics(run: Run) -> MetricsWriter:
    return MetricsWriter(
        Path(run.config.run_directory),
        first_step=run.first_step,
        progress=TrainingProgress(run.num_steps, every=run.config.logging.every),
        tensorboard=run.config.logging.tensorboard,
    )


def _timed(batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Yield each batch with the seconds that were spent waiting for it."""
    iterator = iter(batches)
    while True:
        begin = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - begin


def _on_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}


def _one_step(run: Run, batch: Batch, data_seconds: float, metrics: MetricsWriter) -> dict[str, float]:
    begin = time.perf_counter()
    result = train_step(run.trainer, batch.step, _on_device(batch, run.device), batch.sample_ids)
    if batch.step == run.first_step:
        _show_without_gradient(result.without_gradient)
    _show_saved(run, metrics)
    state = [memory_bytes(run.device), metrics.problem is not None, run.saver.has_failed]
    most = torch.tensor(state, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if most[1]:
        _check_written(metrics)
    if most[2]:
        run.saver.finish()
    seconds = data_seconds + time.perf_counter() - begin
    tokens_per_step = run.config.global_batch_size * run.config.data.sequence_length
    return {
        "epoch": batch.epoch + 1,
        "loss": result.loss,
        "grad_norm": result.gradient_norm,
        "learning_rate": result.learning_rate,
        "tokens": (batch.step + 1) * tokens_per_step,
        "trained_tokens": result.num_tokens,
        "tokens_per_second": tokens_per_step / seconds,
        "teraflops_per_second": run.flops_per_token * tokens_per_step / seconds / dist.get_world_size() / 1e12,
        "memory_bytes": int(most[0]),
        "seconds": seconds,
        "data_seconds": data_seconds,
        "forward_backward_seconds": result.forward_backward_seconds,
        "optimizer_seconds": result.optimizer_seconds,
        **result.router,
        **result.scaling,
    }


def _show_without_gradient(names: Iterable[str]) -> None:
    """Say which trainable parameters nothing trains; a mistake in a model or plan would show here. Collective."""
    if found := sorted({name for answer in gather_objects(tuple(names)) for name in answer}):
        console.line(f"No gradient in the first step, so not trained ({len(found)}): {name_some(found, 5)}")


def _check_written(metrics: MetricsWriter) -> None:
    """Stop all ranks if the first could not write its metrics. Collective."""
    advice = "training stopped; make room, then resume: it goes on from its newest checkpoint"
    raise_together([f"{metrics.problem}; {advice}"] if metrics.problem else [], TrainingStopped)


def _evaluate(run: Run, step: int, metrics: MetricsWriter) -> float:
    assert run.evaluation_batches is not None
    begin = time.perf_counter()
    loss = evaluate(run.trainer, (_on_device(batch, run.device) for batch in run.evaluation_batches()))
    if not math.isfinite(loss):
        raise TrainingStopped(
            f"step {step}: the evaluation loss is {loss}, so the parameters are broken; stopped before a checkpoint of "
            "them was written. Lower optimizer.learning_rate, or set optimizer.max_gradient_norm"
        )
    metrics.write(step, {"eval_loss": loss, "evaluation_seconds": time.perf_counter() - begin})
    return loss


def _checkpoint(run: Run, step: int, evaluation_loss: float | None, metrics: MetricsWriter) -> None:
    begin = time.perf_counter()
    run.save(step, evaluation_loss)
    metrics.write(step, {"checkpoint_seconds": time.perf_counter() - begin})
    _show_saved(run, metrics)


def _show_saved(run: Run, metrics: MetricsWriter) -> None:
    """Tell of the checkpoints that were published since the last call."""
    for saved in run.saver.published():
        if run.config.checkpoint.in_background:
            metrics.write(saved.step, {"checkpoint_background_seconds": saved.seconds})
        console.line(f"Saved {shown_place(saved.directory)}")


def _is_due(step: int, every: int | None, num_steps: int) -> bool:
    return step == num_steps or (every is not None and step % every == 0)


def _show_end(run: Run, evaluation_loss: float | None) -> None:
    if evaluation_loss is not None:
        console.line(
            f"Validation loss {evaluation_loss:.3f} nats per token; the unigram entropy of the text is "
            f"{run.unigram_entropy:.3f}, which a model reaches that knows nothing but token frequencies"
        )
    console.line(f"Done. Metrics: {shown(Path(run.config.run_directory) / METRICS_NAME)}")
