"""The loop: step, evaluate, save, and tell the hooks of it."""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain import console
from meshtrain.checkpoint.saver import Saver
from meshtrain.config.run import RunConfig
from meshtrain.data.loader import Batch
from meshtrain.data.order import place_in_data
from meshtrain.errors import CheckpointError, TrainingStopped, name_some
from meshtrain.runtime.agreement import gather_objects, raise_together
from meshtrain.runtime.garbage import set_aside
from meshtrain.runtime.signals import describe_reason
from meshtrain.training.history import BadStep
from meshtrain.training.hooks import NOTHING, Hooks
from meshtrain.training.metrics import memory_bytes
from meshtrain.training.step import StepContext, StepResult, evaluate, train_step


@dataclass(frozen=True)
class Run:
    """A run that is ready to go.

    Attributes:
        hooks: are told of everything; with the state that they are given.
        first_step: steps done before.
        num_steps: steps to be done in all.
        epoch_of: place in the data, in batches from 0 -> epoch.
        train_batches: those of the remaining steps.
        evaluation_batches: source -> gives its validation data anew, of those that have any.
        save: writes the checkpoint of a step, given its evaluation loss if there is one.
        saver: what `save` writes with.
        rewind: goes back to the newest checkpoint, leaves out the batch of a bad step from there on, and returns the
            steps done before and the batches of the others.
        flops_per_token: of the model, forward and backward, for a sequence length.
        parameters_checksum: of the parameters that the first step finds; None without self-checks.
    """

    config: RunConfig
    context: StepContext
    hooks: Hooks
    device: torch.device
    first_step: int
    num_steps: int
    epoch_of: Callable[[int], int]
    train_batches: Iterable[Batch]
    evaluation_batches: Mapping[str, Callable[[], Iterable[Batch]]]
    save: Callable[[int, float | None], None]
    saver: Saver
    rewind: Callable[[BadStep], tuple[int, Iterable[Batch]]]
    flops_per_token: Callable[[int], float]
    parameters_checksum: str | None


def run_loop(run: Run) -> int:
    """Train to the last step; evaluate and save on the way and at the end.

    Returns:
        0 if the last step is done; otherwise why training was asked to stop, and has saved: `StopRequest.reason`.

    Raises:
        TrainingStopped: if a step is bad and the run shall not, may not or cannot go on; if the evaluation loss or what
            shall be saved is not finite; if a hook has a problem.
        CheckpointError: if a checkpoint cannot be written, or none can be gone back to.
    """
    if run.first_step >= run.num_steps:
        console.line(f"Nothing to do: {run.first_step:,} of {run.num_steps:,} steps are done; raise `steps` to go on")
        return 0
    try:
        reason = _train_with_rewinds(run)
    except BaseException as error:
        run.hooks.end(failure=error)
        raise
    finally:
        gc.unfreeze()
    run.hooks.end(stopped_by=describe_reason(reason) if reason else None)
    return reason


def _train_with_rewinds(run: Run) -> int:
    try:
        end = _train(run, {"parameters_checksum": run.parameters_checksum} if run.parameters_checksum else NOTHING)
        while isinstance(end, BadStep):
            run.context.pipeline.place.begin("rewind")
            first_step, batches = run.rewind(end)
            run = replace(run, first_step=first_step, train_batches=batches)
            end = _train(run, end.note("rewind", len(run.context.history.left_out)))
    except TrainingStopped as stopped:
        # On all processes alike, and what is being saved is good.
        try:
            _finish_saving(run)
        except CheckpointError as error:
            raise TrainingStopped([*stopped.problems, *error.problems]) from stopped
        raise
    return end


def _train(run: Run, note: Mapping[str, Any]) -> int | BadStep:
    """Train from the first step of `run` to the last, to where it is asked to stop, or to a step to be rewound."""
    place = run.context.pipeline.place
    run.hooks.start(run.first_step, note)
    for batch, data_seconds in _timed(run):
        step = batch.step + 1
        values, stop_reason, bad = _one_step(run, batch, data_seconds)
        if bad is not None and run.config.bad_steps.policy == "rewind":
            _finish_saving(run)
            return bad
        may_go_on, loss, is_saved = step < run.num_steps, None, False
        place.enter("hooks")
        run.hooks.step(
            values,
            epoch_ends=_next_epoch(run, step) != batch.epoch or not may_go_on,
            note=NOTHING if bad is None else bad.note("skip", run.context.history.num_bad),
        )
        place.end_step()
        stop_reason = stop_reason if may_go_on else 0
        if not stop_reason:
            if run.evaluation_batches and _is_due(step, run.config.evaluation.every, run.num_steps):
                loss = _evaluate(run, step)
            if is_saved := _is_due(step, run.config.checkpoint.every, run.num_steps):
                _checkpoint(run, step, loss)
            if may_go_on and (is_saved or loss is not None):
                # Both may take longer than whoever asks to stop has patience for another step.
                stop_reason = _agreed_reason(run)
        if stop_reason:
            if not is_saved:
                _checkpoint(run, step, loss)
            break
    _finish_saving(run)
    _check_problem(run)
    return stop_reason


def _timed(run: Run) -> Iterator[tuple[Batch, float]]:
    """Yield each batch with the seconds that were spent waiting for it."""
    iterator = iter(run.train_batches)
    for step in range(run.first_step, run.num_steps):
        run.context.pipeline.place.begin_step(step + 1)
        begin = time.perf_counter()
        batch = next(iterator)
        yield batch, time.perf_counter() - begin


def _on_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}


def _one_step(run: Run, batch: Batch, data_seconds: float) -> tuple[dict[str, float], int, BadStep | None]:
    """Return the metrics of a step, why to stop after it, if any process was asked to, and what is bad about it."""
    begin = time.perf_counter()
    result = train_step(run.context, batch.step, _on_device(batch, run.device), batch.sample_ids)
    state = run.hooks.state
    state.step = batch.step + 1
    if batch.step == run.first_step:
        _show_without_gradient(result.without_gradient)
        # With what the first step has compiled and built.
        set_aside()
    run.context.pipeline.place.enter("metrics")
    # The fewest of what all have heard of is the largest negative number.
    here = [memory_bytes(run.device), state.problem is not None, run.saver.has_failed, -run.saver.num_published]
    most = torch.tensor([*here, state.stop.reason()], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    memory, has_problem, is_unsaved, fewest, stop_reason = most.tolist()
    if has_problem:
        _check_problem(run)
    if is_unsaved:
        run.saver.finish()
    _tell_of_saved(run, at_most=-int(fewest))
    values = _values(run, batch, result, int(memory), (data_seconds, data_seconds + time.perf_counter() - begin))
    bad = None
    if result.fault is not None:
        bad = BadStep(batch.step + 1, batch.data_step, batch.sample_ids, result.fault)
    return values, int(stop_reason), bad


def _values(run: Run, batch: Batch, result: StepResult, memory: int, times: tuple[float, float]) -> dict[str, float]:
    """Return the metrics of a step.

    Args:
        memory: the most bytes of any process.
        times: seconds spent waiting for data, and in all.
    """
    data_seconds, seconds = times
    width = batch.tensors["labels"].shape[1]
    tokens_per_step = run.config.global_batch_size * width
    return {
        "epoch": batch.epoch + 1,
        "loss": result.loss,
        "grad_norm": result.gradient_norm,
        "learning_rate": result.learning_rate,
        # Where batches are as wide as their longest sample, what came before cannot be told from the step.
        **({"tokens": (batch.step + 1) * tokens_per_step} if run.config.data.pad_to_multiple_of is None else {}),
        "trained_tokens": result.num_tokens,
        "tokens_per_second": tokens_per_step / seconds,
        "teraflops_per_second": run.flops_per_token(width) * tokens_per_step / seconds / dist.get_world_size() / 1e12,
        "memory_bytes": memory,
        "seconds": seconds,
        "data_seconds": data_seconds,
        "forward_backward_seconds": result.forward_backward_seconds,
        "optimizer_seconds": result.optimizer_seconds,
        **result.router,
        **result.scaling,
        **run.context.history.metrics(),
        **{f"samples/{source}": count for source, count in batch.source_samples.items()},
    }


def _next_epoch(run: Run, step: int) -> int:
    return run.epoch_of(place_in_data(step, run.context.history.left_out))


def _show_without_gradient(names: Iterable[str]) -> None:
    """Say which trainable parameters nothing trains; a mistake in a model or plan would show here. Collective."""
    if found := sorted({name for answer in gather_objects(tuple(names)) for name in answer}):
        console.line(f"No gradient in the first step, so not trained ({len(found)}): {name_some(found, 5)}")


def _check_problem(run: Run) -> None:
    """Stop all ranks if a hook of one of them cannot go on. Collective."""
    problem = run.hooks.state.problem
    raise_together([problem] if problem else [], TrainingStopped)


def _evaluate(run: Run, step: int) -> float:
    run.context.pipeline.place.begin("evaluation")
    begin = time.perf_counter()
    found = {
        name: evaluate(run.context, (_on_device(batch, run.device) for batch in batches()))
        for name, batches in run.evaluation_batches.items()
    }
    loss = sum(mean * count for mean, count in found.values()) / max(1, sum(count for _, count in found.values()))
    if not math.isfinite(loss):
        raise TrainingStopped(
            f"step {step}: the evaluation loss is {loss}, so the parameters are broken; stopped before a checkpoint of "
            "them was written. Lower optimizer.learning_rate, or set optimizer.max_gradient_norm"
        )
    of_each = {f"eval_loss/{name}": mean for name, (mean, _) in found.items()} if len(found) > 1 else {}
    run.hooks.evaluation({"eval_loss": loss, **of_each, "evaluation_seconds": time.perf_counter() - begin})
    return loss


def _agreed_reason(run: Run) -> int:
    """Return why any process was asked to stop; 0 if none was. Collective."""
    reason = torch.tensor(run.hooks.state.stop.reason())
    dist.all_reduce(reason, op=dist.ReduceOp.MAX)
    return int(reason)


def _checkpoint(run: Run, step: int, evaluation_loss: float | None) -> None:
    run.context.pipeline.place.begin("checkpoint")
    begin = time.perf_counter()
    # All have finished the one before now, so all hear of it here.
    run.saver.finish()
    _tell_of_saved(run)
    run.save(step, evaluation_loss)
    metrics = {"checkpoint_seconds": time.perf_counter() - begin}
    if run.config.checkpoint.in_background:
        run.hooks.checkpoint(metrics, None)
    else:
        (saved,) = run.saver.published()
        run.hooks.checkpoint(metrics, saved)


def _finish_saving(run: Run) -> None:
    """Wait for what is being saved."""
    run.context.pipeline.place.begin("checkpoint")
    run.saver.finish()
    _tell_of_saved(run)


def _tell_of_saved(run: Run, *, at_most: int | None = None) -> None:
    """Tell of the checkpoints that were published in the background since the last call; on all ranks of the same."""
    for saved in run.saver.published(at_most):
        run.hooks.checkpoint({"checkpoint_background_seconds": saved.seconds}, saved)


def _is_due(step: int, every: int | None, num_steps: int) -> bool:
    return step == num_steps or (every is not None and step % every == 0)
