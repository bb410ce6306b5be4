"""The loss that a run minimizes: the cross-entropy, with label smoothing and z-loss."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.config.objective import STOCK_OBJECTIVE, ObjectiveConfig
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.tensor.collectives import max_over_shards, shard_width
from meshtrain.parallel.transposable import sum_over
from meshtrain.training.loss import MeanLoss, MeanWithTerms, TokenLoss, build_loss, vocabulary_of, widened

CROSS_ENTROPY, Z_LOSS = "cross_entropy", "z_loss"


def build_objective(pipeline: Pipeline, config: ObjectiveConfig = STOCK_OBJECTIVE) -> TokenLoss:
    """Return the loss of a run, for logits as the last stage of its pipeline returns them."""
    if config == STOCK_OBJECTIVE:
        return build_loss(pipeline)
    vocabulary, group = vocabulary_of(pipeline)
    return RegularizedLoss(vocabulary, group, config.label_smoothing, config.z_loss)


@dataclass(frozen=True)
class RegularizedLoss(TokenLoss):
    """The cross-entropy with label smoothing and a z-loss.

    Attributes:
        label_smoothing: probability that the targets of a token share evenly.
        z_loss: factor of the z-loss.
    """

    label_smoothing: float
    z_loss: float

    @property
    def term_names(self) -> tuple[str, ...]:
        """Return the metrics for the terms of the loss of a step."""
        return (CROSS_ENTROPY, Z_LOSS) if self.z_loss else (CROSS_ENTROPY,)

    def mean_over(self, num_tokens: Tensor, *, scale: float = 1.0) -> MeanLoss:
        """Return the loss function of one step; the arguments are those of `TokenLoss`."""
        sums = torch.zeros(2, dtype=torch.float64, device=num_tokens.device)
        step = _SumWithTerms(self, sums)
        number = num_tokens.clamp(min=1)
        return MeanWithTerms(step, number, scale, number.expand(len(self.term_names)))


@dataclass(frozen=True)
class _SumWithTerms:
    """The loss of a microbatch, summed over its trained tokens.

    Attributes:
        loss: what is summed.
        sums: (2,) float64, of the cross-entropy and the z-loss, over the microbatches of a step.
    """

    loss: RegularizedLoss
    sums: Tensor

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        own = self.loss
        total, terms = _RegularizedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            widened(logits).flatten(0, 1), labels.flatten(), own.vocabulary, own.group, own.label_smoothing, own.z_loss
        )
        self.sums.add_(terms)
        found: Tensor = total
        return found


class _RegularizedCrossEntropy(torch.autograd.Function):
    """Sums over logits, which may be sharded over the vocabulary.

    With sharded logits, each call makes two small reductions.

    Source: Szegedy et al. (arXiv:1512.00567), section 7, for label smoothing; PaLM
    (arXiv:2204.02311), section 5, for the z-loss.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: Tensor,
        labels: Tensor,
        vocabulary: int,
        group: ProcessGroup | None,
        smoothing: float,
        factor: float,
    ) -> tuple[Tensor, Tensor]:
        counted = here = labels != IGNORE_INDEX
        columns, largest = labels, logits.amax(-1)
        if group is not None:
            columns = labels - group.rank() * shard_width(vocabulary, group)
            here = counted & (columns >= 0) & (columns < logits.shape[-1])
            largest = max_over_shards(largest, group)
        columns = columns.masked_fill(~here, 0)
        shifted = logits - largest.unsqueeze(-1)
        target = shifted.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        # Without smoothing, a logit of -inf is allowed.
        spread = shifted.sum(-1) if smoothing else torch.zeros_like(target)
        weights = shifted.exp_()
        sums = torch.stack([weights.sum(-1), target, spread])
        normalizer, target, spread = sums if group is None else sum_over(sums, group)
        weights /= normalizer.unsqueeze(-1)
        log_normalizer = normalizer.log()
        logsumexp = log_normalizer + largest
        loss = log_normalizer - (1.0 - smoothing) * target - (smoothing / vocabulary) * spread
        loss += factor * logsumexp.square()
        found = torch.stack([loss, log_normalizer - target, logsumexp.square()]).masked_fill(~counted, 0.0).sum(-1)
        ctx.save_for_backward(weights, columns, here, counted, logsumexp)
        ctx.smoothing, ctx.factor, ctx.vocabulary = smoothing, factor, vocabulary  # type: ignore[attr-defined]
        total, terms = found[0].clone(), found[1:].clone()
        ctx.mark_non_differentiable(terms)
        return total, terms

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None, None, None, None]:
        weights, columns, here, counted, logsumexp = ctx.saved_tensors  # type: ignore[attr-defined]
        smoothing, factor, vocabulary = ctx.smoothing, ctx.factor, ctx.vocabulary  # type: ignore[attr-defined]
        if factor:
            weights *= (1.0 + 2.0 * factor * logsumexp).unsqueeze(-1)
        if smoothing:
            weights -= smoothing / vocabulary
        targets = here.to(weights.dtype) * (smoothing - 1.0)
        weights.scatter_add_(-1, columns.unsqueeze(-1), targets.unsqueeze(-1))
        weights *= (counted * gradient).unsqueeze(-1)
        return weights, None, None, None, None, None
