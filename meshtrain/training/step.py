"""One optimizer step. No mode branches: the variants were chosen when the pipeline was built."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshtrain.errors import TrainingStopped
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import DATA_AXES, all_reduce_over
from meshtrain.training.gradients import fill_gradients, finish_gradients, forget_unused, gradient_norm, scale_gradients
from meshtrain.training.loss import TokenLoss, count_trained_tokens
from meshtrain.training.optim import ShardedAdamW


@dataclass(frozen=True)
class Trainer:
    """What a step works with; nothing of it needs saving but the parameters and the optimizer's state.

    Attributes:
        learning_rate: of a step, counted from 0.
        max_gradient_norm: gradients are scaled down to it; `inf` leaves them as they are.
    """

    pipeline: Pipeline
    loss: TokenLoss
    optimizer: ShardedAdamW
    learning_rate: Callable[[int], float]
    max_gradient_norm: float


@dataclass(frozen=True)
class StepResult:
    """What a step has to say.

    Attributes:
        loss: mean over the trained tokens of the global batch, in nats.
        gradient_norm: before clipping.
        num_tokens: trained tokens in the global batch.
        without_gradient: names of this process's trainable parameters that no sample of the batch gave a gradient.
        forward_backward_seconds: on this process, waiting for others included.
        optimizer_seconds: gradient reductions beyond FSDP's, norm, clipping and update.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    num_tokens: int
    without_gradient: tuple[str, ...]
    forward_backward_seconds: float
    optimizer_seconds: float


def train_step(trainer: Trainer, step: int, batch: Mapping[str, Tensor], sample_ids: np.ndarray) -> StepResult:
    """Run one step on this process's part of a global batch.

    Args:
        step: counted from 0.
        batch: `input_ids`, `labels` (local_batch, seq) and further model inputs, on the pipeline's device.
        sample_ids: of the whole global batch, for the message when something goes wrong.

    Raises:
        TrainingStopped: on all processes alike, before any parameter changes, if loss or gradient is not finite.
    """
    begin = time.perf_counter()
    pipeline = trainer.pipeline
    trainer.optimizer.zero_grad()
    pipeline.streams.begin_step(step)
    num_tokens = all_reduce_over(count_trained_tokens(batch["labels"]), pipeline.mesh, DATA_AXES)
    # A batch without a trained token has loss 0 and no gradient, not 0 / 0.
    trainer.loss.num_tokens = num_tokens.clamp(min=1)
    local_loss = pipeline.forward_backward(batch, trainer.loss)
    forward_backward_done = time.perf_counter()
    filled = fill_gradients(pipeline)
    finish_gradients(pipeline)
    # Experts may be used on one process of a tp group only.
    num_filled = all_reduce_over(local_loss.new_full((), float(len(filled))), pipeline.mesh, ["tp"])
    sums = all_reduce_over(torch.stack([local_loss, num_filled]), pipeline.mesh, DATA_AXES)
    norm, loss, num_filled = gradient_norm(pipeline, *sums)
    learning_rate = trainer.learning_rate(step)
    _check_finite(loss.item(), norm.item(), step, sample_ids)
    if math.isfinite(trainer.max_gradient_norm):
        scale_gradients([parameter for _, parameter in pipeline.named_parameters()], norm, trainer.max_gradient_norm)
    # All processes know that one of them has filled in zeros: usually none has, and nothing needs to be asked.
    unused = forget_unused(pipeline, filled) if num_filled.item() else ()
    trainer.optimizer.step(learning_rate)
    return StepResult(
        loss=loss.item(),
        gradient_norm=norm.item(),
        learning_rate=learning_rate,
        num_tokens=int(num_tokens),
        without_gradient=unused,
        forward_backward_seconds=forward_backward_done - begin,
        optimizer_seconds=time.perf_counter() - forward_backward_done,
    )


@torch.no_grad()
def evaluate(trainer: Trainer, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """Return the mean loss over all trained tokens of the batches, in nats; every process must see as many."""
    pipeline = trainer.pipeline
    device = trainer.loss.num_tokens.device
    trainer.loss.num_tokens = torch.ones((), device=device)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        totals[0] += pipeline.evaluate(batch, trainer.loss)
        totals[1] += count_trained_tokens(batch["labels"])
    all_reduce_over(totals, pipeline.mesh, DATA_AXES)
    # Every process of a pipeline counted the same tokens; only the last stage has a loss.
    loss = all_reduce_over(totals[0], pipeline.mesh, ["pp"])
    return (loss / totals[1].clamp(min=1)).item()


def _check_finite(loss: float, norm: float, step: int, sample_ids: np.ndarray) -> None:
    if math.isfinite(loss) and math.isfinite(norm):
        return
    ids = ", ".join(map(str, sample_ids[:16].tolist())) + (", ..." if len(sample_ids) > 16 else "")
    raise TrainingStopped(
        f"step {step + 1}: the loss is {loss}, the gradient norm {norm}; stopped before the optimizer step, so the "
        f"parameters and the last checkpoint are as they were. Samples of this step: {ids}. Look at them, lower "
        "optimizer.learning_rate, or set optimizer.max_gradient_norm"
    )
