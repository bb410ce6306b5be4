"""The cross-entropy of tokens that count differently."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.data.samples.weights import BITS, TOKEN
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.loss import (
    MeanLoss,
    TokenLoss,
    count_trained_tokens,
    sharded_cross_entropy,
    vocabulary_of,
    widened,
)


@dataclass(frozen=True)
class WeightedLoss(TokenLoss):
    """The mean of the cross-entropy over the trained tokens, each with its weight.

    Labels of training have weights (`meshtrain.data.samples.weights`), and those of evaluations
    have none. The sum over all tokens of a global batch is divided by the sum of their weights.
    """

    def counted(self, labels: Tensor) -> Tensor:
        """Return (2,) float64: the number of trained tokens, and the sum of their weights."""
        _, weights = split_labels(labels)
        return torch.stack([count_trained_tokens(labels).double(), weights.double().sum()])

    def num_tokens(self, counted: Tensor) -> Tensor:
        """Return the () number of trained tokens, from the sums of `counted`."""
        return counted[0].long()

    def weighted_total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the () sum over the trained tokens; the arguments are those of `TokenLoss`."""
        labels, weights = split_labels(labels.flatten())
        logits = widened(logits).flatten(0, 1)
        weights = weights.to(logits.dtype)
        if self.group is not None:
            return sharded_cross_entropy(logits, labels, self.vocabulary, self.group, weights)
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none") @ weights

    def mean_over(self, counted: Tensor, *, scale: float = 1.0) -> MeanLoss:
        """Return the loss function of one step; the arguments are those of `TokenLoss`."""
        # Tokens of weight 0 alone have loss 0 and no gradient.
        total = torch.where(counted[1] > 0, counted[1], 1.0)
        return MeanLoss(self.weighted_total, total, scale)


def build_weighted_loss(pipeline: Pipeline) -> WeightedLoss:
    """Return the loss of labels with weights, for logits as the last stage returns them."""
    return WeightedLoss(*vocabulary_of(pipeline))


def split_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return labels without weights, and the float32 weights, 0 for labels that do not count."""
    counts = labels != IGNORE_INDEX
    weights = (labels >> BITS).to(torch.int32).view(torch.float32)
    return torch.where(counts, labels & TOKEN, labels), torch.where(counts, weights, 0.0)
