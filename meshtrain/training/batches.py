"""Batches that this process reads in a run."""

from collections.abc import Iterable
from typing import Any

from meshtrain.config.mesh import DATA_AXES
from meshtrain.data.samples.loader import Batch, build_loader
from meshtrain.runtime.mesh import axis_size, data_rank
from meshtrain.training.build import Run


def train_batches(run: Run) -> Iterable[Batch]:
    """Return the batches of the remaining steps, without those that rewinds have left out."""
    return build_loader(
        run.dataset.samples,
        run.dataset.order,
        start_step=run.state.step,
        stop_step=run.num_steps,
        left_out=run.context.history.left_out,
        **_share(run),
    )


def evaluation_batches(run: Run) -> dict[str, Iterable[Batch]]:
    """Return source -> batches of its validation data, for the sources that have any."""
    batches = {}
    for name, (samples, order) in run.dataset.validation.items():
        num_batches = min(order.steps_per_epoch, run.config.evaluation.max_batches or order.steps_per_epoch)
        batches[name] = build_loader(samples, order, start_step=0, stop_step=num_batches, **_share(run))
    return batches


def _share(run: Run) -> dict[str, Any]:
    """Return the arguments of `build_loader` that depend on this process: its part of a batch."""
    pipeline = run.pipeline
    return {
        "dp_rank": data_rank(pipeline.mesh),
        "dp_size": axis_size(pipeline.mesh, *DATA_AXES),
        # Stages between the first and the last do not use tokens.
        "with_tokens": pipeline.has_first_stage or pipeline.has_last_stage,
        "pin_memory": run.process.device.type == "cuda",
    }
