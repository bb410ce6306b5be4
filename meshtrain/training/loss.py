"""The loss: next-token cross-entropy, summed over tokens and divided once by their global count."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.config.mesh import TP
from meshtrain.parallel.head.chunks import LossFunction
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.tensor.collectives import max_over_shards, shard_width
from meshtrain.parallel.transposable import sum_over

Batch = Mapping[str, Tensor]
"""Name -> tensor of a batch; the model takes all of them but `labels`."""


@dataclass(frozen=True)
class TokenLoss:
    """The cross-entropy of a microbatch, summed over its trained tokens.

    A subclass trains on another loss. Evaluations are those of the cross-entropy.

    Attributes:
        vocabulary: size of the full vocabulary.
        group: the tp group, if the logits are sharded over it; else None.
    """

    vocabulary: int
    group: ProcessGroup | None

    @property
    def term_names(self) -> tuple[str, ...]:
        """Return the metrics for the terms of the loss of a step."""
        return ()

    @property
    def evaluated_terms(self) -> tuple[str, ...]:
        """Return the metrics for the terms of an evaluation."""
        return ()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the () sum of the cross-entropy over the trained tokens, in nats.

        Args:
            logits: (batch, seq, vocab) or this process's (batch, seq, vocab/tp).
            labels: (batch, seq), int64, already shifted; IGNORE_INDEX marks tokens that do not
                count.
        """
        return self._reduced(logits, labels, "sum")

    def of_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the (batch, seq) cross-entropy of each token, 0 for one that does not count.

        The arguments are as above.
        """
        return self._reduced(logits, labels, "none").view_as(labels)

    def _reduced(self, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
        logits, labels = widened(logits).flatten(0, 1), labels.flatten()
        if self.group is None:
            return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction=reduction)
        return sharded_cross_entropy(logits, labels, self.vocabulary, self.group, reduction=reduction)

    def counted(self, labels: Tensor) -> Tensor:
        """Return what is summed over the labels of all processes for `mean_over`: their number."""
        return count_trained_tokens(labels)

    def num_tokens(self, counted: Tensor) -> Tensor:
        """Return the () int64 number of trained tokens, from the sums of `counted`."""
        return counted

    def begin_step(self, pipeline: Pipeline, batch: Batch, counted: Tensor, scale: float) -> "tuple[Batch, MeanLoss]":
        """Return what the pipeline computes of a batch, and the loss function of the step.

        Collective, for a loss that needs another pass before.

        Args:
            pipeline: of the run.
            batch: of this process, as the data have it.
            counted: the sum of `counted` over the global batch.
            scale: the loss scale of float16.
        """
        return batch, self.mean_over(counted, scale=scale)

    def evaluate(self, pipeline: Pipeline, batch: Batch) -> Tensor:
        """Return (2 * terms + 2,) float64 sums over a batch: of the loss, of each term, and counts.

        The first half is what this process has computed, and the second what its data count, which
        is the same on all processes of a pipeline and of a cp group. Collective.

        Args:
            pipeline: of the run.
            batch: of this process, as the data have it.
        """
        return torch.stack([pipeline.evaluate(batch, self), count_trained_tokens(batch["labels"]).double()])

    def mean_over(self, num_tokens: Tensor, *, scale: float = 1.0) -> "MeanLoss":
        """Return the loss function of one step.

        Args:
            num_tokens: () int64, the number of trained tokens in the global batch: the sum of
                `counted`.
            scale: the loss scale of float16.
        """
        # A batch without a trained token has loss 0 and no gradient, instead of 0 / 0.
        return MeanLoss(self, num_tokens.clamp(min=1), scale)


@dataclass(frozen=True)
class MeanLoss:
    """The share of a microbatch in the mean loss of a global batch: the loss function of one step.

    Attributes:
        total: the sum over the trained tokens of a microbatch.
        divisor: () number of what the loss is a mean over in the global batch: trained tokens, the
            sum of their weights, or samples; 1 if there is none.
        scale: the loss scale of float16, which the result is multiplied by.
    """

    total: LossFunction
    divisor: Tensor
    scale: float

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the () share of a microbatch; the arguments are those of `TokenLoss`."""
        return self.total(logits, labels) * self.scale / self.divisor

    def terms(self) -> tuple[Tensor, ...]:
        """Return this process's () share in each term of the step, without the loss scale."""
        return ()


class SumsTerms(Protocol):
    """The loss of a microbatch, which adds up its terms."""

    @property
    def sums(self) -> Tensor:
        """Return the float64 sums over the microbatches so far, of at least the terms."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the () sum; the arguments are those of `TokenLoss`."""


@dataclass(frozen=True)
class MeanWithTerms(MeanLoss):
    """A mean loss whose terms are metrics.

    Attributes:
        counts: (terms,) numbers that the terms are means over.
    """

    total: SumsTerms
    counts: Tensor

    def terms(self) -> tuple[Tensor, ...]:
        """Return this process's () share in each term of the step, without the loss scale."""
        return (self.total.sums[: len(self.counts)] / self.counts).unbind()


def widened(logits: Tensor) -> Tensor:
    """Return logits in float32, or in float64, which stays for proofs.

    16-bit formats have too few digits for a sum over many tokens.
    """
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def build_loss(pipeline: Pipeline) -> TokenLoss:
    """Return the cross-entropy of a pipeline's model, for logits as its last stage returns them."""
    return TokenLoss(*vocabulary_of(pipeline))


def vocabulary_of(pipeline: Pipeline) -> tuple[int, ProcessGroup | None]:
    """Return the size of the vocabulary, and the tp group if the logits are sharded over it."""
    vocabulary = pipeline.stages[0].model.config.get_text_config().vocab_size
    return vocabulary, pipeline.mesh.get_group(TP) if pipeline.logits_are_sharded else None


def count_trained_tokens(labels: Tensor) -> Tensor:
    """Return the () int64 number of labels that count."""
    return (labels != IGNORE_INDEX).sum()


def sharded_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocabulary: int,
    group: ProcessGroup,
    token_weights: Tensor | None = None,
    *,
    reduction: str = "sum",
) -> Tensor:
    """Return the cross-entropy of the trained tokens for sharded logits, as `F.cross_entropy` does.

    Args:
        logits: this process's (tokens, vocab/tp).
        labels: (tokens,).
        vocabulary: size of the full vocabulary.
        group: the tp group.
        token_weights: (tokens,), which the losses of the tokens are multiplied by; None: 1.
        reduction: `sum` for the () sum; `none` for (tokens,) losses, 0 for one that does not count.
    """
    found: Tensor = _ShardedCrossEntropy.apply(logits, labels, vocabulary, group, token_weights, reduction)  # type: ignore[no-untyped-call]
    return found


class _ShardedCrossEntropy(torch.autograd.Function):
    """The cross-entropy of logits that are sharded over the vocabulary, in total or of each token.

    Each call makes two small reductions.

    Source: Megatron-LM (arXiv:1909.08053), section 3.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: Tensor,
        labels: Tensor,
        vocabulary: int,
        group: ProcessGroup,
        token_weights: Tensor | None,
        reduction: str,
    ) -> Tensor:
        first = group.rank() * shard_width(vocabulary, group)
        counted = labels != IGNORE_INDEX
        columns = labels - first
        here = counted & (columns >= 0) & (columns < logits.shape[-1])
        columns = columns.masked_fill(~here, 0)
        largest = max_over_shards(logits.amax(-1), group)
        shifted = logits - largest.unsqueeze(-1)
        target = shifted.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        weights = shifted.exp_()
        # One reduction is enough for both sums.
        normalizer, target = sum_over(torch.stack([weights.sum(-1), target]), group)
        weights /= normalizer.unsqueeze(-1)
        losses = (normalizer.log() - target).masked_fill(~counted, 0.0)
        if token_weights is not None:
            losses, counted = losses * token_weights, counted * token_weights
        ctx.save_for_backward(weights, columns, here, counted)
        return losses.sum() if reduction == "sum" else losses

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None, None, None, None, None]:
        weights, columns, here, counted = ctx.saved_tensors  # type: ignore[attr-defined]
        weights.scatter_add_(-1, columns.unsqueeze(-1), -here.to(weights.dtype).unsqueeze(-1))
        weights *= (counted * gradient).unsqueeze(-1)
        return weights, None, None, None, None, None
