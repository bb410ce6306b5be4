"""One optimizer step. No mode branches: the variants were chosen when the pipeline was built."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from meshtrain.config.mesh import DATA_AXES, PP, TP
from meshtrain.config.plan import PrecisionPlan
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import all_reduce_over
from meshtrain.training.gradients import fill_gradients, finish_gradients, forget_unused, gradient_norm, scale_gradients
from meshtrain.training.history import StepHistory
from meshtrain.training.loss import TokenLoss, count_trained_tokens
from meshtrain.training.loss_scale import LossScale, build_loss_scale

Inspection = Callable[[Mapping[str, Tensor]], None]
"""Looks at the batch and at the whole gradients of a step, before they change anything."""


def no_inspection(batch: Mapping[str, Tensor]) -> None:
    """Look at nothing."""


@dataclass(frozen=True)
class Trainer:
    """What a step works with; of it the parameters, the optimizer's state, the loss scale and the history need saving.

    Attributes:
        optimizer: over local parts; its learning rate is set at every step.
        learning_rate: of a step, counted from 0; steps that were skipped do not count.
        max_gradient_norm: gradients are scaled down to it; `inf` leaves them as they are.
        loss_scale: of float16; otherwise 1 for ever.
        history: tells a bad step from a good one.
        inspect: called once the gradients are whole.
    """

    pipeline: Pipeline
    loss: TokenLoss
    optimizer: Optimizer
    learning_rate: Callable[[int], float]
    max_gradient_norm: float
    loss_scale: LossScale = field(default_factory=lambda: build_loss_scale(PrecisionPlan()))
    history: StepHistory = field(default_factory=StepHistory)
    inspect: Inspection = no_inspection


@dataclass(frozen=True)
class StepResult:
    """What a step has to say.

    Attributes:
        loss: mean over the trained tokens of the global batch, in nats; without the auxiliary loss of routers.
        gradient_norm: before clipping, and without the loss scale.
        num_tokens: trained tokens in the global batch.
        without_gradient: names of this process's trainable parameters that no sample of the batch gave a gradient.
        forward_backward_seconds: on this process, waiting for others included.
        optimizer_seconds: gradient reductions beyond FSDP's, norm, clipping and update.
        is_skipped: whether a float16 gradient overflowed or the step is bad, so that no parameter has changed.
        fault: what is wrong with a bad step.
        router: the mean auxiliary loss of the routers, if there is one; not yet multiplied by its coefficient.
        scaling: the loss scale of the next step and the number of skipped steps, if there is loss scaling.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    num_tokens: int
    without_gradient: tuple[str, ...]
    forward_backward_seconds: float
    optimizer_seconds: float
    is_skipped: bool
    fault: str | None
    router: dict[str, float]
    scaling: dict[str, float]


def train_step(trainer: Trainer, step: int, batch: Mapping[str, Tensor], sample_ids: np.ndarray) -> StepResult:
    """Run one step on this process's part of a global batch.

    Args:
        step: counted from 0.
        batch: `input_ids`, `labels` (local_batch, seq) and further model inputs, on the pipeline's device.
        sample_ids: of the whole global batch, for the message when something goes wrong.

    Raises:
        TrainingStopped: on all processes alike, before any parameter changes, if the step is bad, a lower loss scale
            cannot help, and the run shall not or may not go on.
    """
    begin = time.perf_counter()
    pipeline, scale = trainer.pipeline, trainer.loss_scale.value
    trainer.optimizer.zero_grad()
    pipeline.streams.begin_step(step)
    num_tokens = all_reduce_over(count_trained_tokens(batch["labels"]), pipeline.mesh, DATA_AXES)
    # A batch without a trained token has loss 0 and no gradient, not 0 / 0.
    trainer.loss.num_tokens = num_tokens.clamp(min=1)
    trainer.loss.scale = pipeline.router_loss.scale = scale
    local_loss = pipeline.forward_backward(batch, trainer.loss)
    if local_loss.is_cuda:
        # Its work is only queued so far. The norm waits for it anyway, and the seconds would be counted there.
        torch.cuda.current_stream().synchronize()
    forward_backward_done = time.perf_counter()
    filled, sums = _finish_gradients(trainer, local_loss)
    norm, loss = sums.norm, sums.loss
    # Both were summed over every axis, so all processes decide alike.
    overflowed = not (math.isfinite(loss.item()) and math.isfinite(norm.item()))
    history, fault = trainer.history, None
    if not (overflowed and trainer.loss_scale.can_be_lower):
        fault = history.fault(loss.item(), norm.item())
    if fault is not None:
        history.check_tolerable(fault, step, sample_ids)
    is_skipped = overflowed or fault is not None
    learning_rate = trainer.learning_rate(step - history.num_skipped)
    unused: tuple[str, ...] = ()
    if not is_skipped:
        trainer.inspect(batch)
        _scale(trainer, norm)
        # All processes know that one of them has filled in zeros: usually none has, and nothing needs to be asked.
        unused = forget_unused(pipeline, filled) if sums.num_filled.item() else ()
        pipeline.place.enter("optimizer")
        for group in trainer.optimizer.param_groups:
            group["lr"] = learning_rate
        trainer.optimizer.step()
    trainer.loss_scale.update(overflowed=overflowed)
    history.add(loss.item(), norm.item(), is_bad=fault is not None, is_skipped=is_skipped)
    return StepResult(
        loss=loss.item(),
        gradient_norm=norm.item(),
        learning_rate=learning_rate,
        num_tokens=int(num_tokens),
        without_gradient=unused,
        forward_backward_seconds=forward_backward_done - begin,
        optimizer_seconds=time.perf_counter() - forward_backward_done,
        is_skipped=is_skipped,
        fault=fault,
        router=pipeline.router_loss.metrics(sums.router_mean),
        scaling=trainer.loss_scale.metrics(history.num_skipped),
    )


class _Sums(NamedTuple):
    """What is known once the gradients are whole: () each, the same on every process, without the loss scale."""

    norm: Tensor
    loss: Tensor
    num_filled: Tensor
    """Gradients that were filled in with zeros, on all processes."""
    router_mean: Tensor


def _finish_gradients(trainer: Trainer, local_loss: Tensor) -> tuple[set[str], _Sums]:
    """Make the gradients whole; return the names of those filled in with zeros here, and what is summed over all."""
    pipeline, scale = trainer.pipeline, trainer.loss_scale.value
    pipeline.place.enter("gradients")
    filled = fill_gradients(pipeline)
    finish_gradients(pipeline)
    # Experts may be used on one process of a tp group only.
    num_filled = all_reduce_over(local_loss.new_full((), float(len(filled))), pipeline.mesh, [TP])
    sums = all_reduce_over(torch.stack([local_loss, num_filled, pipeline.router_loss.total]), pipeline.mesh, DATA_AXES)
    norm, loss, num_filled, router_mean = gradient_norm(pipeline, *sums)
    return filled, _Sums(norm / scale, loss / scale, num_filled, router_mean)


def _scale(trainer: Trainer, norm: Tensor) -> None:
    scale = trainer.loss_scale.value
    if math.isfinite(trainer.max_gradient_norm) or scale != 1.0:
        parameters = [parameter for _, parameter in trainer.pipeline.named_parameters()]
        scale_gradients(parameters, norm, trainer.max_gradient_norm, loss_scale=scale)


@torch.no_grad()
def evaluate(trainer: Trainer, batches: Iterable[Mapping[str, Tensor]]) -> tuple[float, int]:
    """Return the mean loss over all trained tokens of the batches, in nats, and how many tokens these are.

    Every process must see as many batches.
    """
    pipeline = trainer.pipeline
    trainer.loss.num_tokens, trainer.loss.scale = torch.ones(()), 1.0
    grown = pipeline.longest.grown()
    sums = [
        torch.stack([pipeline.evaluate(batch, trainer.loss), count_trained_tokens(batch["labels"]).double()])
        for batch in batches
    ]
    # A run that was stopped before this evaluation goes on without it.
    pipeline.longest.restore(grown)
    totals = all_reduce_over(torch.stack(sums).sum(0), pipeline.mesh, DATA_AXES)
    # Every process of a pipeline counted the same tokens; only the last stage has a loss.
    loss = all_reduce_over(totals[0], pipeline.mesh, [PP])
    return (loss / totals[1].clamp(min=1)).item(), int(totals[1])
