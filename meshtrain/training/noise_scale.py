"""The noise scale of gradients: how large a batch can be before its gradient is hardly better."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshtrain.checkpoint.manifest import SavedNoise
from meshtrain.config.data import IGNORE_INDEX
from meshtrain.config.mesh import DATA_AXES
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.schedules import SCHEDULES
from meshtrain.errors import ConfigError
from meshtrain.parallel.check import BatchShape
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import all_reduce_over, data_rank
from meshtrain.training.gradients import fill_gradients, finish_gradients, gradient_norm
from meshtrain.training.loss import TokenLoss

DECAY = 0.95
"""Part of the averages that stays at a measurement."""


@dataclass
class NoiseScale:
    """Compares the gradient of some batches with that of their first sequences.

    The variance of a gradient falls with the number of sequences. So the squared norms for two
    numbers give the variance for one sequence, and the squared norm of the true gradient. Their
    ratio, of averages over measurements, is the noise scale, in sequences.

    Attributes:
        every: number of steps between measurements; None: there are none.
        variance: average of the variance for one sequence, the trace of the covariance.
        squared_norm: average of the squared norm of the true gradient.

    Source: An empirical model of large-batch training (McCandlish et al., arXiv:1812.06162),
        appendix A.1.
    """

    every: int | None = None
    variance: float = 0.0
    squared_norm: float = 0.0

    def of_small_batch(
        self, pipeline: Pipeline, loss: TokenLoss, step: int, batch: Mapping[str, Tensor], *, loss_scale: float
    ) -> tuple[Tensor, ...]:
        """Return the () gradient norm and the () number of trained tokens of the first sequences.

        They are float64. Nothing is returned if no measurement is due. Collective. The first data
        rank has all of these sequences, and the others compute without any label. So they are the
        same on every mesh. The model has no gradients, before and after.

        Args:
            pipeline: the part of the model on this process.
            loss: what training minimizes.
            step: counted from 0.
            batch: of the step.
            loss_scale: of the step.
        """
        if self.every is None or step % self.every:
            return ()
        rows = small_batch_size(pipeline.plan, pipeline.micro_batch_size)
        small = {name: value[:rows] for name, value in batch.items()}
        if data_rank(pipeline.mesh):
            small["labels"] = torch.full_like(small["labels"], IGNORE_INDEX)
        pipeline.streams.begin_step(step)
        counted = all_reduce_over(loss.counted(small["labels"]), pipeline.mesh, DATA_AXES)
        pipeline.forward_backward(small, loss.mean_over(counted, scale=loss_scale), loss_scale=loss_scale)
        fill_gradients(pipeline)
        finish_gradients(pipeline)
        (norm,) = gradient_norm(pipeline)
        # These tokens are counted again with the full batch.
        pipeline.expert_use.totals()
        for _, parameter in pipeline.named_parameters():
            parameter.grad = None
        return norm / loss_scale, loss.num_tokens(counted).to(norm)

    def add(self, small: Sequence[float], norm: float, num_tokens: int, num_sequences: int) -> dict[str, float]:
        """Take a measurement into the averages, and return the metrics.

        Args:
            small: what `of_small_batch` returned.
            norm: of the gradient of the full batch.
            num_tokens: trained tokens of the full batch.
            num_sequences: of the full batch.
        """
        if not small:
            return {}
        small_norm, small_tokens = small
        if not math.isfinite(small_norm) or not 0 < small_tokens < num_tokens:
            return {}
        part = small_tokens / num_tokens
        squared_norm = (norm**2 - part * small_norm**2) / (1 - part)
        variance = (small_norm**2 - norm**2) * num_sequences * part / (1 - part)
        self.variance += (1 - DECAY) * (variance - self.variance)
        self.squared_norm += (1 - DECAY) * (squared_norm - self.squared_norm)
        found = {"gradient_variance": variance, "gradient_squared_norm": squared_norm}
        # With few measurements, the averages of small numbers may be negative.
        is_known = self.squared_norm > 0 and self.variance > 0
        return found | ({"noise_scale": self.variance / self.squared_norm} if is_known else {})

    def saved(self) -> SavedNoise | None:
        """Return what a checkpoint keeps; None if there are no measurements."""
        return None if self.every is None else SavedNoise(variance=self.variance, squared_norm=self.squared_norm)

    def restore(self, saved: SavedNoise | None) -> None:
        """Take over the averages of a checkpoint; without them, begin anew."""
        saved = saved or SavedNoise()
        self.variance, self.squared_norm = saved.variance, saved.squared_norm


def small_batch_size(plan: ParallelPlan, micro_batch_size: int) -> int:
    """Return the smallest number of sequences that a process can compute in a step."""
    needs_one_per_stage = SCHEDULES[plan.pipeline.schedule].microbatches == "one per stage"
    return micro_batch_size * (plan.mesh.pp * plan.pipeline.stages_per_rank if needs_one_per_stage else 1)


def check_noise_scale(plan: ParallelPlan, batch: BatchShape) -> None:
    """Check that every batch has a smaller part.

    Args:
        plan: resolved.
        batch: its shape.

    Raises:
        ConfigError: if a batch has none.
    """
    smallest, part = min((batch.global_batch_size, *batch.smaller)), small_batch_size(plan, batch.micro_batch_size)
    if part >= smallest:
        raise ConfigError(
            f"logging.noise_scale_every compares a batch with a part of it, and a batch of {smallest} sequences has "
            f"none: this plan computes at least {part} in a step",
            "raise global_batch_size, lower micro_batch_size, or leave it out",
        )
