"""One optimizer step. It has no mode branches: variants were chosen when the pipeline was built."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from meshtrain.config.mesh import CP, DATA_AXES, PP, TOKEN_AXES, TP
from meshtrain.config.plan import PrecisionPlan
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.routers.loss import MOST_TERMS
from meshtrain.runtime.mesh import all_reduce_over, axis_size
from meshtrain.training.gradients import (
    NO_LAYERS,
    LayerNorms,
    fill_gradients,
    finish_gradients,
    forget_unused,
    gradient_device,
    gradient_norm,
    scale_gradients,
)
from meshtrain.training.history import StepHistory
from meshtrain.training.loss import TokenLoss
from meshtrain.training.loss_scale import LossScale, build_loss_scale
from meshtrain.training.noise_scale import NoiseScale
from meshtrain.training.parameter_groups import FACTOR

Inspection = Callable[[Mapping[str, Tensor]], None]
"""Inspects the batch and the complete gradients of a step before any parameter changes."""


def no_inspection(batch: Mapping[str, Tensor]) -> None:
    """Inspect nothing."""


def no_update(step: int) -> None:
    """Update nothing."""


@dataclass(frozen=True)
class StepContext:
    """What a step works with.

    A checkpoint holds the parameters, the state of the optimizer, the loss scale and the history.

    Attributes:
        loss: what training minimizes; evaluations are those of the cross-entropy.
        optimizer: works on local parts; its learning rate is set at every step.
        learning_rate: learning rate of a step, counted from 0; skipped steps do not count.
        max_gradient_norm: gradients are scaled down to this norm; `inf` leaves them as they are.
        loss_scale: dynamic for float16; otherwise always 1.
        history: decides whether a step is bad.
        inspect: called once the gradients are complete.
        layer_norms: the layers whose gradient norms are metrics.
        each_expert: whether the tokens of each expert are metrics.
        noise_scale: measures the noise of the gradients in some steps.
        after_update: called with the number of steps done once the parameters have changed.
    """

    pipeline: Pipeline
    loss: TokenLoss
    optimizer: Optimizer
    learning_rate: Callable[[int], float]
    max_gradient_norm: float
    loss_scale: LossScale = field(default_factory=lambda: build_loss_scale(PrecisionPlan()))
    history: StepHistory = field(default_factory=StepHistory)
    inspect: Inspection = no_inspection
    layer_norms: LayerNorms = NO_LAYERS
    each_expert: bool = False
    noise_scale: NoiseScale = field(default_factory=NoiseScale)
    after_update: Callable[[int], None] = no_update


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step.

    Attributes:
        loss: mean over the trained tokens of the global batch, in nats; without the losses of
            routers.
        terms: what the loss consists of, unless it is the cross-entropy alone; before factors.
        gradient_norm: norm before clipping, and without the loss scale.
        layer_norms: those of layers, by their names, if they are measured.
        noise: the noise of the gradients, if it was measured in this step.
        num_tokens: number of trained tokens in the global batch.
        without_gradient: names of this process's trainable parameters for which no sample of the
            batch gave a gradient.
        forward_backward_seconds: time on this process, including the wait for others.
        optimizer_seconds: time for gradient reductions beyond FSDP's, norm, clipping and update.
        is_skipped: whether a float16 gradient overflowed or the step is bad, so that no parameter
            has changed.
        fault: what is wrong with a bad step.
        router: the mean of each loss of the routers, if there is one; before its coefficient.
        experts: how many tokens the experts got, if there are any.
        scaling: the loss scale of the next step and the number of skipped steps, if there is loss
            scaling.
    """

    loss: float
    terms: dict[str, float]
    gradient_norm: float
    layer_norms: dict[str, float]
    noise: dict[str, float]
    learning_rate: float
    num_tokens: int
    without_gradient: tuple[str, ...]
    forward_backward_seconds: float
    optimizer_seconds: float
    is_skipped: bool
    fault: str | None
    router: dict[str, float]
    experts: dict[str, float]
    scaling: dict[str, float]


def train_step(context: StepContext, step: int, batch: Mapping[str, Tensor], sample_ids: np.ndarray) -> StepResult:
    """Run one step on this process's part of a global batch.

    Args:
        step: counted from 0.
        batch: `input_ids`, `labels` (local_batch, seq) and further model inputs, on the device.
        sample_ids: samples of the full global batch; an error names them.

    Raises:
        TrainingStopped: on all processes alike, before any parameter changes: the step is bad, a
            lower loss scale cannot help, and the policy for bad steps does not let the run
            continue.
    """
    begin = time.perf_counter()
    pipeline, history = context.pipeline, context.history
    computed = _compute_gradients(context, step, batch)
    computed_at = mark(gradient_device(pipeline))
    filled, norm, packed = _finish_gradients(context, computed)
    finished_at = mark(gradient_device(pipeline))
    # Everything queued so far is done once it returns. It is the only read from the device in a
    # step, but for the rows that travel to experts of other ranks, and for the borders of separate
    # documents, which are read before the first pass.
    names, layers = context.loss.term_names, context.layer_norms.names
    totals = _Totals.unpacked(packed.tolist(), len(names), len(layers), len(computed.small))
    read = time.perf_counter()
    finish_seconds = computed_at.seconds_until(finished_at)

    overflowed, fault = _judge(context, totals, step, sample_ids)
    is_skipped = overflowed or fault is not None
    learning_rate = context.learning_rate(step - history.num_skipped)
    unused: tuple[str, ...] = ()
    noise: dict[str, float] = {}
    if not is_skipped:
        context.inspect(batch)
        noise = context.noise_scale.add(totals.small, totals.norm, int(totals.num_tokens), len(sample_ids))
        _scale(context, norm)
        # Usually no process has filled in a gradient, and no exchange is needed.
        unused = forget_unused(pipeline, filled) if totals.num_filled else ()
        _update(context, learning_rate)
        context.after_update(step + 1)
    context.loss_scale.update(overflowed=overflowed)
    history.add(totals.loss, totals.norm, is_bad=fault is not None, is_skipped=is_skipped)
    return StepResult(
        loss=totals.loss,
        terms=dict(zip(names, totals.terms, strict=True)),
        gradient_norm=totals.norm,
        layer_norms=dict(zip(layers, totals.layer_norms, strict=True)),
        noise=noise,
        learning_rate=learning_rate,
        num_tokens=int(totals.num_tokens),
        without_gradient=unused,
        forward_backward_seconds=read - begin - finish_seconds,
        optimizer_seconds=time.perf_counter() - read + finish_seconds,
        is_skipped=is_skipped,
        fault=fault,
        router=pipeline.router_loss.metrics(totals.router_means),
        experts=pipeline.expert_use.metrics(*totals.experts),
        scaling=context.loss_scale.metrics(history.num_skipped),
    )


class _Computed(NamedTuple):
    """Results of the forward and backward passes, besides the gradients."""

    loss: Tensor
    """() float64: this process's share in the mean loss, times the loss scale."""
    num_tokens: Tensor
    """() int64: trained tokens in the global batch."""
    terms: tuple[Tensor, ...]
    """() float64 each: this process's share in the terms of the loss."""
    small: tuple[Tensor, ...]
    """Norm and trained tokens of a part of the batch, if the noise of gradients is measured."""


class _Totals(NamedTuple):
    """The numbers of a step that the host needs.

    They are the same on every process, and without the loss scale.
    """

    norm: float
    loss: float
    num_filled: float
    """Number of gradients that were filled in with zeros, on all processes."""
    num_tokens: float
    terms: tuple[float, ...]
    router_means: tuple[float, ...]
    experts: tuple[float, ...]
    """What `ExpertUse.metrics` takes."""
    layer_norms: tuple[float, ...]
    small: tuple[float, ...]
    """Norm and trained tokens of a part of the batch, if the noise of gradients is measured."""

    @classmethod
    def unpacked(cls, numbers: Sequence[float], num_terms: int, num_layers: int, num_small: int) -> Self:
        """Return the fields that `_finish_gradients` has joined to a vector.

        Args:
            num_terms: number of terms of the loss.
            num_layers: number of layers whose norms are measured.
            num_small: how many numbers of a part of the batch there are.
        """
        rest = iter(numbers)
        norm, loss, num_filled, num_tokens = islice(rest, 4)
        sizes = [num_terms, MOST_TERMS, num_layers, num_small]
        sizes.insert(2, len(numbers) - 4 - sum(sizes))
        return cls(norm, loss, num_filled, num_tokens, *((*islice(rest, size),) for size in sizes))


def _compute_gradients(context: StepContext, step: int, batch: Mapping[str, Tensor]) -> _Computed:
    pipeline, scale = context.pipeline, context.loss_scale.value
    context.optimizer.zero_grad()
    small = context.noise_scale.of_small_batch(pipeline, context.loss, step, batch, loss_scale=scale)
    pipeline.streams.begin_step(step)
    counted = all_reduce_over(context.loss.counted(batch["labels"]), pipeline.mesh, DATA_AXES)
    inputs, mean_loss = context.loss.begin_step(pipeline, batch, counted, scale)
    loss = pipeline.forward_backward(inputs, mean_loss, loss_scale=scale)
    return _Computed(loss, context.loss.num_tokens(counted), mean_loss.terms(), small)


def _finish_gradients(context: StepContext, computed: _Computed) -> tuple[set[str], Tensor, Tensor]:
    """Complete the gradients.

    Returns:
        The names of the gradients that were filled in with zeros on this process; the () norm, for
        clipping; the fields of `_Totals`, the norms of layers and what was measured of a part of
        the batch, joined, float64, all on the device.
    """
    pipeline, scale = context.pipeline, context.loss_scale.value
    pipeline.activity.enter("gradients")
    filled = fill_gradients(pipeline)
    finish_gradients(pipeline)
    loss = computed.loss
    # A tp group may have used some experts on one of its processes only.
    num_filled = all_reduce_over(loss.new_full((), float(len(filled))), pipeline.mesh, [TP])
    own = torch.cat([torch.stack([loss, num_filled, *computed.terms]), pipeline.router_loss.total])
    norm, loss, num_filled, *means = gradient_norm(pipeline, *all_reduce_over(own, pipeline.mesh, TOKEN_AXES))
    norm = norm / scale
    found = torch.stack([norm, loss / scale, num_filled, computed.num_tokens.to(norm), *means])
    layers = (norms.to(found) / scale for norms in context.layer_norms.of(pipeline))
    small = (it.to(found).unsqueeze(0) for it in computed.small)
    experts = [pipeline.expert_use.totals().to(found)]
    if context.each_expert:
        experts.append(pipeline.expert_use.of_each().to(found))
    return filled, norm, torch.cat([found, *experts, *layers, *small])


def _judge(context: StepContext, totals: _Totals, step: int, sample_ids: np.ndarray) -> tuple[bool, str | None]:
    """Return whether a float16 gradient overflowed, and what is wrong with a bad step.

    Raises:
        TrainingStopped: if the run must not continue after the fault.
    """
    overflowed = not (math.isfinite(totals.loss) and math.isfinite(totals.norm))
    if overflowed and context.loss_scale.can_be_lower:
        return True, None
    fault = context.history.fault(totals.loss, totals.norm)
    if fault is not None:
        context.history.check_tolerable(fault, step, sample_ids)
    return overflowed, fault


def _scale(context: StepContext, norm: Tensor) -> None:
    scale = context.loss_scale.value
    if math.isfinite(context.max_gradient_norm) or scale != 1.0:
        parameters = [parameter for _, parameter in context.pipeline.named_parameters()]
        scale_gradients(parameters, norm, context.max_gradient_norm, loss_scale=scale)


def _update(context: StepContext, learning_rate: float) -> None:
    context.pipeline.activity.enter("optimizer")
    for group in context.optimizer.param_groups:
        group["lr"] = learning_rate * group.get(FACTOR, 1.0)
    context.optimizer.step()
    context.pipeline.expert_use.move_biases()


@dataclass(frozen=True)
class Mark:
    """A point in the work of this process.

    Attributes:
        host_seconds: when the host reached the point, on its monotonic clock.
        event: on a GPU, which runs behind the host: the point in its queue; otherwise None.
    """

    host_seconds: float
    event: torch.cuda.Event | None

    def seconds_until(self, later: "Mark") -> float:
        """Return the seconds from this mark to a later one of the same device.

        The device must have reached both, or torch raises a RuntimeError.
        """
        if self.event is None or later.event is None:
            return later.host_seconds - self.host_seconds
        return self.event.elapsed_time(later.event) / 1000.0


def mark(device: torch.device) -> Mark:
    """Mark the end of the work that is queued so far; the host does not wait for it."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
    return Mark(time.perf_counter(), event)


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation.

    Attributes:
        loss: mean over what the loss counts: trained tokens, or answers and pairs of them.
        count: their number.
        terms: what the loss consists of, as for a step, each with the number it is a mean over. A
            mean over nothing is NaN.
    """

    loss: float
    count: int
    terms: dict[str, tuple[float, float]]


@torch.no_grad()
def evaluate(context: StepContext, batches: Iterable[Mapping[str, Tensor]]) -> Evaluated:
    """Return the mean loss of all batches.

    Every process must get the same number of batches.
    """
    pipeline = context.pipeline
    grown = pipeline.rotary_length.grown()
    sums = [context.loss.evaluate(pipeline, batch) for batch in batches]
    # Undone, because a run that was stopped before this evaluation resumes without it.
    pipeline.rotary_length.restore(grown)
    computed, counts = all_reduce_over(torch.stack(sums).sum(0), pipeline.mesh, TOKEN_AXES).chunk(2)
    # Every process of a cp group counted the tokens of full sequences. After the sum, the division
    # is exact.
    counts /= axis_size(pipeline.mesh, CP)
    # Every process of a pipeline counted the same tokens; only the last stage has a loss.
    computed = all_reduce_over(computed, pipeline.mesh, [PP])
    loss = computed[:1] / counts[:1].clamp(min=1)
    (mean, *means), (count, *numbers) = torch.stack([torch.cat([loss, computed[1:] / counts[1:]]), counts]).tolist()
    terms = zip(means, numbers, strict=True)
    return Evaluated(mean, int(count), dict(zip(context.loss.evaluated_terms, terms, strict=True)))
