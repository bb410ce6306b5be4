"""The loop of a run: step, evaluate, save, and notify the hooks."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain import console
from meshtrain.config.mesh import DATA_AXES
from meshtrain.data.samples.loader import Batch, build_loader
from meshtrain.data.samples.order import find_data_step
from meshtrain.errors import CheckpointError, TrainingStopped, name_some
from meshtrain.runtime.agreement import gather_objects, raise_together
from meshtrain.runtime.garbage_collection import freeze_objects, frozen_objects_released
from meshtrain.runtime.mesh import axis_size, data_rank
from meshtrain.runtime.signals import describe_reason
from meshtrain.training.build import Run
from meshtrain.training.evaluators import Evaluator
from meshtrain.training.history import BadStep
from meshtrain.training.hooks import NOTHING
from meshtrain.training.metrics import memory_bytes
from meshtrain.training.run_checkpoints import finish_saving, notify_of_saved, rewind, save
from meshtrain.training.schedule_free import weights_of_result
from meshtrain.training.step import Evaluated, StepResult, evaluate, train_step


class _Done(NamedTuple):
    """What the loop must know about a finished step."""

    metrics: dict[str, float]
    bad: BadStep | None
    """What is wrong with the step; None if it is good."""
    stop_reason: int
    """Why a process was asked to stop after the step: `StopRequest.reason`; 0 if none was."""


class _Largest(NamedTuple):
    """Maximum of each number over all ranks, after a step."""

    memory_bytes: float
    has_problem: float
    has_unsaved: float
    """Whether a save in the background has failed."""
    fewest_published: float
    """Number of published checkpoints, negated: the maximum gives the number all ranks know of."""
    stop_reason: float


def run_loop(run: Run, parameters_checksum: str | None) -> int:
    """Train to the last step; evaluate and save on the way and at the end.

    Args:
        parameters_checksum: checksum of the parameters before the first step; None without
            self-checks.

    Returns:
        0 if the last step is done. Otherwise the run was asked to stop and has saved; the result is
        the reason, `StopRequest.reason`.

    Raises:
        TrainingStopped: if a step is bad and the run cannot or must not continue, if the evaluation
            loss or the state to be saved is not finite, or if a hook has reported a problem.
        CheckpointError: if a checkpoint cannot be written, or none is intact to go back to.
    """
    if run.state.step >= run.num_steps:
        console.line(
            f"Nothing to do: {run.state.step:,} of {run.num_steps:,} steps are done; raise `steps` to continue"
        )
        return 0
    note = {"parameters_checksum": parameters_checksum} if parameters_checksum else {}
    try:
        with frozen_objects_released():
            reason = _train_with_rewinds(run, note)
    except BaseException as error:
        run.hooks.end(failure=error)
        raise
    run.hooks.end(stopped_by=describe_reason(reason) if reason else None)
    return reason


def _train_with_rewinds(run: Run, note: Mapping[str, Any]) -> int:
    try:
        end = _train(run, note)
        while isinstance(end, BadStep):
            run.pipeline.activity.begin("rewind")
            rewind(run, end)
            end = _train(run, end.note("rewind", len(run.context.history.left_out)))
    except TrainingStopped as stopped:
        # All ranks raise it alike, and the checkpoint that is being written is good.
        try:
            finish_saving(run)
        except CheckpointError as error:
            raise TrainingStopped([*stopped.problems, *error.problems]) from stopped
        raise
    return end


def _train(run: Run, note: Mapping[str, Any]) -> int | BadStep:
    """Train until the last step, a request to stop, or a bad step that needs a rewind.

    Returns:
        0 after the last step; the reason to stop; or the bad step.
    """
    stop_reason, first_step = 0, run.state.step
    run.hooks.start(first_step, note)
    for batch, data_seconds in _timed_batches(run):
        done = _one_step(run, batch, data_seconds, is_first=batch.step == first_step)
        if done.bad is not None and run.config.bad_steps.policy == "rewind":
            finish_saving(run)
            return done.bad
        _notify_of_step(run, batch, done)
        stop_reason = _evaluate_and_save(run, done.stop_reason)
        if stop_reason:
            break
    finish_saving(run)
    _check_problem(run)
    return stop_reason


def _timed_batches(run: Run) -> Iterator[tuple[Batch, float]]:
    """Yield each batch with the seconds spent waiting for it."""
    batches, first_step = iter(_train_batches(run)), run.state.step
    for step in range(first_step, run.num_steps):
        run.pipeline.activity.begin_step(step + 1)
        begin = time.perf_counter()
        batch = next(batches)
        yield batch, time.perf_counter() - begin


def _one_step(run: Run, batch: Batch, data_seconds: float, *, is_first: bool) -> _Done:
    begin = time.perf_counter()
    result = train_step(run.context, batch.step, on_device(run, batch), batch.sample_ids)
    run.state.step = batch.step + 1
    if is_first:
        _show_without_gradient(result.without_gradient)
        # This comes after the first step, which compiles and builds objects that stay.
        freeze_objects()
    run.pipeline.activity.enter("metrics")
    largest = _agree(run)
    if largest.has_problem:
        _check_problem(run)
    if largest.has_unsaved:
        run.saver.finish()
    notify_of_saved(run, at_most=-int(largest.fewest_published))
    times = data_seconds, data_seconds + time.perf_counter() - begin
    metrics = _metrics(run, batch, result, int(largest.memory_bytes), times)
    fault = result.fault
    bad = None if fault is None else BadStep(run.state.step, batch.data_step, batch.sample_ids, fault)
    return _Done(metrics, bad, int(largest.stop_reason))


def _train_batches(run: Run) -> Iterable[Batch]:
    """Return the batches of the remaining steps, without those that rewinds have left out."""
    return build_loader(
        run.dataset.samples,
        run.dataset.order,
        start_step=run.state.step,
        stop_step=run.num_steps,
        left_out=run.context.history.left_out,
        **data_share(run),
    )


def _evaluation_batches(run: Run) -> dict[str, Iterable[Batch]]:
    """Return source -> batches of its validation data, for the sources that have any."""
    batches = {}
    for name, (samples, order) in run.dataset.validation.items():
        num_batches = min(order.steps_per_epoch, run.config.evaluation.max_batches or order.steps_per_epoch)
        batches[name] = build_loader(samples, order, start_step=0, stop_step=num_batches, **data_share(run))
    return batches


def data_share(run: Run) -> dict[str, Any]:
    """Return the arguments of `build_loader` that depend on this process: its part of a batch."""
    pipeline = run.pipeline
    return {
        "dp_rank": data_rank(pipeline.mesh),
        "dp_size": axis_size(pipeline.mesh, *DATA_AXES),
        # Stages between the first and the last do not use tokens.
        "with_tokens": pipeline.has_first_stage or pipeline.has_last_stage,
        "pin_memory": run.process.device.type == "cuda",
    }


def on_device(run: Run, batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch on the device of this process."""
    return {name: tensor.to(run.process.device, non_blocking=True) for name, tensor in batch.tensors.items()}


def _agree(run: Run) -> _Largest:
    """Exchange in one message what all ranks must know of each other after a step. Collective."""
    here = _Largest(
        memory_bytes=memory_bytes(run.process.device),
        has_problem=run.state.problem is not None,
        has_unsaved=run.saver.has_failed,
        fewest_published=-run.saver.num_published,
        stop_reason=run.state.stop.reason(),
    )
    largest = torch.tensor(here, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return _Largest(*largest.tolist())


def _metrics(run: Run, batch: Batch, result: StepResult, memory: int, times: tuple[float, float]) -> dict[str, float]:
    """Return the metrics of a step.

    Args:
        memory: the largest number of bytes that any process has used.
        times: seconds spent waiting for data, and in total.
    """
    data_seconds, seconds = times
    width = batch.tensors["labels"].shape[1]
    tokens_of_sample = run.config.preference.rows * width
    num_tokens = len(batch.sample_ids) * tokens_of_sample
    return {
        "epoch": batch.epoch + 1,
        "loss": result.loss,
        **result.terms,
        "grad_norm": result.gradient_norm,
        **{f"grad_norm/{name}": norm for name, norm in result.layer_norms.items()},
        **result.noise,
        "learning_rate": result.learning_rate,
        **({"batch_size": len(batch.sample_ids)} if run.config.batch_ramp.first is not None else {}),
        # Padded batches differ in width, so the number of tokens does not follow from the step.
        **({"tokens": batch.num_samples * tokens_of_sample} if run.config.data.pad_to_multiple_of is None else {}),
        "trained_tokens": result.num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "teraflops_per_second": run.flops_per_token(width) * num_tokens / seconds / dist.get_world_size() / 1e12,
        "memory_bytes": memory,
        "seconds": seconds,
        "data_seconds": data_seconds,
        "forward_backward_seconds": result.forward_backward_seconds,
        "optimizer_seconds": result.optimizer_seconds,
        **result.router,
        **result.experts,
        **result.scaling,
        **run.context.history.metrics(),
        **{f"samples/{source}": count for source, count in batch.source_samples.items()},
    }


def _notify_of_step(run: Run, batch: Batch, done: _Done) -> None:
    step, history = run.state.step, run.context.history
    run.pipeline.activity.enter("hooks")
    next_epoch = run.dataset.order.epoch(find_data_step(step, history.left_out))
    run.hooks.step(
        done.metrics,
        epoch_ends=next_epoch != batch.epoch or step == run.num_steps,
        note=NOTHING if done.bad is None else done.bad.note("skip", history.num_bad),
    )
    run.pipeline.activity.end_step()


def _evaluate_and_save(run: Run, stop_reason: int) -> int:
    """Evaluate and save what is due after a step, and save before a stop.

    Args:
        stop_reason: why to stop after the step; 0 to continue.

    Returns:
        The same, or why a process was asked to stop meanwhile; 0 after the last step.
    """
    step, loss, is_saved, due = run.state.step, None, False, []
    is_last = step == run.num_steps
    if is_last or not stop_reason:
        if run.dataset.validation and _is_due(run, run.config.evaluation.every):
            loss = _evaluate(run)
        if is_saved := _is_due(run, run.config.checkpoint.every):
            save(run, step, loss)
        # They may take long, and fail. The step is safe by then.
        due = [evaluator for evaluator in run.evaluators if _is_due(run, evaluator.every)]
        for evaluator in due:
            _evaluate_with(run, evaluator)
    if is_last:
        return 0
    if is_saved or loss is not None or due:
        # All of them may take long. A request to stop that has come meanwhile must not wait.
        stop_reason = _agreed_reason(run)
    if stop_reason and not is_saved:
        save(run, step, loss)
    return stop_reason


def _is_due(run: Run, every: int | None) -> bool:
    step = run.state.step
    return step == run.num_steps or (every is not None and step % every == 0)


def _evaluate(run: Run) -> float:
    run.pipeline.activity.begin("evaluation")
    begin = time.perf_counter()
    with weights_of_result(run.context.optimizer):
        found = _evaluate_sources(run)
    loss = _mean_over_sources(found)
    if not math.isfinite(loss):
        raise TrainingStopped(
            f"step {run.state.step}: the evaluation loss is {loss}, so the parameters are broken; training stopped "
            "before a checkpoint was written",
            "lower optimizer.learning_rate, or set optimizer.max_gradient_norm",
        )
    of_each = {f"eval_loss/{name}": it.loss for name, it in found.items()} if len(found) > 1 else {}
    terms = {f"eval_{name}": value for name, value in _mean_terms(found).items()}
    of_average = {}
    if run.average is not None and run.config.ema.evaluate:
        with run.average.in_place_of_weights():
            of_average = {"eval_loss_ema": _mean_over_sources(_evaluate_sources(run))}
    seconds = {"evaluation_seconds": time.perf_counter() - begin}
    run.hooks.evaluation({"eval_loss": loss, **terms, **of_each, **of_average, **seconds})
    return loss


def _evaluate_with(run: Run, evaluator: Evaluator) -> None:
    run.pipeline.activity.begin("evaluation")
    # Long texts change dynamic rotary frequencies.
    grown = run.pipeline.rotary_length.grown()
    with weights_of_result(run.context.optimizer):
        found = evaluator.evaluate(run.pipeline, run.identity.data.tokenizer.directory)
    run.pipeline.rotary_length.restore(grown)
    run.hooks.scores(found.metrics, found.note)


def _evaluate_sources(run: Run) -> dict[str, Evaluated]:
    """Return source -> the evaluation of its validation data."""
    return {
        name: evaluate(run.context, (on_device(run, batch) for batch in batches))
        for name, batches in _evaluation_batches(run).items()
    }


def _mean_over_sources(found: Mapping[str, Evaluated]) -> float:
    return sum(it.loss * it.count for it in found.values()) / max(1, sum(it.count for it in found.values()))


def _mean_terms(found: Mapping[str, Evaluated]) -> dict[str, float]:
    """Return the terms over all sources; NaN for one that is a mean over nothing."""
    names = next(iter(found.values())).terms
    parts = {name: [it.terms[name] for it in found.values() if it.terms[name][1]] for name in names}
    return {
        name: sum(mean * number for mean, number in some) / sum(number for _, number in some) if some else math.nan
        for name, some in parts.items()
    }


def _agreed_reason(run: Run) -> int:
    """Return why any process was asked to stop; 0 if none was. Collective."""
    reason = torch.tensor(run.state.stop.reason())
    dist.all_reduce(reason, op=dist.ReduceOp.MAX)
    return int(reason)


def _show_without_gradient(names: Iterable[str]) -> None:
    """Print the trainable parameters that got no gradient. Collective.

    A mistake in a model or a plan shows here.
    """
    if found := sorted({name for answer in gather_objects(tuple(names)) for name in answer}):
        console.line(f"No gradient in the first step, so not trained ({len(found)}): {name_some(found, 5)}")


def _check_problem(run: Run) -> None:
    """Stop all ranks if a hook on one of them has reported a problem. Collective."""
    problem = run.state.problem
    raise_together([problem] if problem else [], TrainingStopped)
