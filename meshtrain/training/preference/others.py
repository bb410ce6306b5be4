"""ORPO, which needs no reference, and KTO, which needs no pairs."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from meshtrain.config.mesh import DATA_AXES, PP
from meshtrain.data.samples.answers import DESIRABLE, MISMATCHED
from meshtrain.data.samples.referenced import REFERENCE
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import all_reduce_over
from meshtrain.training.loss import Batch
from meshtrain.training.preference.formulas import PAIR_TERMS, kto, log_odds_ratio, pair_terms
from meshtrain.training.preference.loss import PreferenceLoss
from meshtrain.training.preference.rows import evaluated_rows


class OrpoLoss(PreferenceLoss):
    """The cross-entropy of chosen answers, and the odds ratio of pairs.

    The cross-entropy is a mean over the tokens of an answer, then over answers.

    Source: Hong et al. (arXiv:2403.07691), section 4.
    """

    @property
    def term_names(self) -> tuple[str, ...]:
        """Return the metrics for the rewards, and for both parts of the loss."""
        return (*PAIR_TERMS, "nll_loss", "log_odds_ratio")

    def values(self, pipeline: Pipeline, batch: Batch) -> tuple[Tensor, ...]:
        """Return nothing."""
        return ()

    def compute(self, log_probs: Tensor, lengths: Tensor, *values: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return losses and rewards of pairs; see `PreferenceLoss`."""
        means, beta = log_probs / lengths, self.config.beta
        chosen, rejected = means.unbind(1)
        ratio = log_odds_ratio(means)
        losses = -chosen - beta * F.logsigmoid(ratio)
        return losses, [*pair_terms(beta * chosen, beta * rejected), -chosen, ratio]


class KtoLoss(PreferenceLoss):
    """The loss of single answers that are desirable or not.

    How far the model is from the reference is measured on the mismatched rows of the global batch,
    in a pass without gradients before each step.

    Source: Ethayarajh et al. (arXiv:2402.01306), section 4.
    """

    @property
    def term_names(self) -> tuple[str, ...]:
        """Return the metrics for the rewards, and for the distance from the reference."""
        return ("rewards/chosen", "rewards/rejected", "kl")

    def values(self, pipeline: Pipeline, batch: Batch) -> tuple[Tensor, ...]:
        """Return (samples,) log-probabilities by the reference, judgements, and the distance."""
        reference = batch[REFERENCE]
        distance = self._distance(pipeline, batch, reference[:, 1])
        return reference[:, 0], batch[DESIRABLE], distance.expand(len(reference))

    def counts(self, batch: Batch) -> Tensor:
        """Return how many answers there are, desirable and undesirable ones, and all again."""
        is_counted = self.is_counted(batch)
        desirable = (is_counted & batch[DESIRABLE]).sum().double()
        every = is_counted.sum().double()
        return every.new_tensor([1, 0, 1, 1]) * every + every.new_tensor([0, 1, -1, 0]) * desirable

    def both_rows(self, pipeline: Pipeline, batch: Batch) -> Tensor:
        """Return the log-probabilities of both answers beside a prompt; see `PreferenceLoss`."""
        own, mismatched = (evaluated_rows(pipeline, self.rows, batch, prefix) for prefix in ("", MISMATCHED))
        return F.pad(own.unsqueeze(1), (0, 1)) + F.pad(mismatched.unsqueeze(1), (1, 0))

    def compute(self, log_probs: Tensor, lengths: Tensor, *values: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return losses and rewards of answers; see `PreferenceLoss`."""
        reference, desirable, distance = values
        config, distance = self.config, distance.to(log_probs)
        weights = config.desirable_weight, config.undesirable_weight
        ratios = log_probs.squeeze(1) - reference.to(log_probs)
        losses, rewards = kto(ratios, desirable, distance, beta=config.beta, weights=weights)
        return losses, [rewards * desirable, rewards * ~desirable, distance]

    def _distance(self, pipeline: Pipeline, batch: Batch, reference: Tensor) -> Tensor:
        """Return the () float64 mean over the mismatched rows of the global batch, at least 0."""
        log_probs = evaluated_rows(pipeline, self.rows, batch, MISMATCHED)
        is_counted = self.is_counted(batch)
        # Only the last stage has log-probabilities.
        total = (log_probs - reference).masked_fill(~is_counted, 0.0).sum() * float(pipeline.has_last_stage)
        total = all_reduce_over(total, pipeline.mesh, (*DATA_AXES, PP))
        number = all_reduce_over(is_counted.sum(), pipeline.mesh, DATA_AXES)
        return (total / number.clamp(min=1)).clamp(min=0.0)
