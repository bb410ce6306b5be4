"""The loss of a run with a teacher."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.config.distillation import DistillationConfig
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.tensor.collectives import gather_vocabulary, shard_width
from meshtrain.training.distillation.divergence import summed_divergence
from meshtrain.training.distillation.passes import BuiltTeacher
from meshtrain.training.loss import Batch, MeanLoss, MeanWithTerms, TokenLoss, vocabulary_of, widened

CROSS_ENTROPY, DIVERGENCE = "cross_entropy", "kl"


def build_distillation_loss(pipeline: Pipeline, teacher: BuiltTeacher, config: DistillationConfig) -> TokenLoss:
    """Return the loss of a run with a teacher, for logits as its last stage returns them."""
    return DistillationLoss(*vocabulary_of(pipeline), config, teacher)


@dataclass(frozen=True)
class DistillationLoss(TokenLoss):
    """The cross-entropy, and how far the model is from its teacher.

    Attributes:
        config: of the run.
        teacher: on the same mesh.
    """

    config: DistillationConfig
    teacher: BuiltTeacher

    @property
    def term_names(self) -> tuple[str, ...]:
        """Return the metrics for both parts of the loss."""
        return (CROSS_ENTROPY, DIVERGENCE)

    def begin_step(self, pipeline: Pipeline, batch: Batch, counted: Tensor, scale: float) -> tuple[Batch, MeanLoss]:
        """Return the batch, and the loss function of the step. Collective.

        The arguments are those of `TokenLoss`.
        """
        pipeline.activity.enter("teacher")
        theirs = self.teacher.logits(batch)
        sums = torch.zeros(2, dtype=torch.float64, device=counted.device)
        number = counted.clamp(min=1)
        return batch, MeanWithTerms(_Microbatches(self, theirs, sums), number, scale, number.expand(2))

    def divergence(self, logits: Tensor, labels: Tensor, theirs: Tensor) -> Tensor:
        """Return the () sum of the divergences of the trained tokens, in nats.

        Args:
            logits: of the model, as for `TokenLoss`.
            labels: (batch, seq).
            theirs: of the teacher, as its last stage returns them.
        """
        theirs = self._laid_out(theirs)
        own, other = (widened(it).flatten(0, 1) for it in (logits, theirs))
        counted = labels.flatten() != IGNORE_INDEX
        return summed_divergence(own, other, counted, self.config.temperature, self.group)

    def _laid_out(self, theirs: Tensor) -> Tensor:
        group = vocabulary_of(self.teacher.pipeline)[1]
        return laid_out(theirs, self.vocabulary, group, self.group)


def laid_out(logits: Tensor, vocabulary: int, there: ProcessGroup | None, here: ProcessGroup | None) -> Tensor:
    """Return logits that are sharded over the vocabulary exactly if those of another model are.

    Args:
        logits: (batch, seq, vocab) or (batch, seq, vocab/tp).
        vocabulary: size of the full one.
        there: the tp group, if `logits` are sharded over it; else None.
        here: the same of the result.
    """
    if there is not None and here is None:
        return gather_vocabulary(logits, vocabulary, there)
    if there is None and here is not None:
        width = shard_width(vocabulary, here)
        return logits[..., here.rank() * width : (here.rank() + 1) * width]
    return logits


@dataclass(frozen=True)
class _Microbatches:
    """The loss of a microbatch, summed over its trained tokens.

    Attributes:
        loss: of the run.
        theirs: the logits of the teacher for each microbatch.
        sums: (2,) float64, of both terms, over the microbatches so far.
    """

    loss: DistillationLoss
    theirs: Iterator[Tensor]
    sums: Tensor

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the () sum; the arguments are those of `TokenLoss`."""
        weight, temperature = self.loss.config.weight, self.loss.config.temperature
        # torch's schedules pass no number of the microbatch. They compute losses in order. Only one
        # microbatch of the teacher's logits exists at once.
        divergence = self.loss.divergence(logits, labels, next(self.theirs))
        cross_entropy = self.loss(logits, labels)
        self.sums.add_(torch.stack([cross_entropy.detach().double(), divergence.detach().double()]))
        # Gradients of the divergence shrink with the square of the temperature.
        return (1.0 - weight) * cross_entropy + weight * temperature**2 * divergence
