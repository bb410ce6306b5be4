"""The formulas: from the log-probabilities of answers to losses and rewards, without a mesh.

Each function returns the loss of each sample, and the values of the metrics, both as sums need
them: a sample that does not count is left to the caller.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PAIR_TERMS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


def dpo(log_probs: Tensor, reference: Tensor, *, beta: float, label_smoothing: float) -> tuple[Tensor, list[Tensor]]:
    """Return the (pairs,) losses of pairs and their rewards.

    Args:
        log_probs: (pairs, 2) of the chosen and the rejected answer, in nats.
        reference: (pairs, 2) the same by the reference.
        beta: factor of the rewards.
        label_smoothing: probability that a pair was interchanged.

    Source: Rafailov et al. (arXiv:2305.18290), section 4; label smoothing: Mitchell (2023), "A note
    on DPO with noisy preferences", as in TRL's DPOTrainer.
    """
    chosen, rejected = (beta * (log_probs - reference)).unbind(1)
    margin = chosen - rejected
    losses = -(1.0 - label_smoothing) * F.logsigmoid(margin)
    if label_smoothing:
        losses = losses - label_smoothing * F.logsigmoid(-margin)
    return losses, pair_terms(chosen, rejected)


def pair_terms(chosen: Tensor, rejected: Tensor) -> list[Tensor]:
    """Return the values of PAIR_TERMS, (pairs,) each."""
    return [chosen, rejected, chosen - rejected, (chosen > rejected).to(chosen.dtype)]


def log_odds_ratio(log_probs: Tensor) -> Tensor:
    """Return the (pairs,) logarithm of the ratio of the odds of two answers.

    Args:
        log_probs: (pairs, 2) mean over the tokens of the chosen and the rejected answer, in nats.

    Source: Hong et al. (arXiv:2403.07691), section 4.
    """
    chosen, rejected = (log_probs - _log_of_rest(log_probs)).unbind(1)
    return chosen - rejected


def _log_of_rest(log_probs: Tensor) -> Tensor:
    """Return log(1 - exp(log_probs)), without cancellation near 0."""
    # Both sides are finite wherever they are not chosen, or their gradient would be NaN.
    near = log_probs > -0.6931471805599453
    small = torch.log(-torch.expm1(torch.where(near, log_probs, -0.5)))
    large = torch.log1p(-torch.exp(torch.where(near, -1.0, log_probs)))
    return torch.where(near, small, large)


def kto(
    log_ratios: Tensor, desirable: Tensor, divergence: Tensor, *, beta: float, weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return the (answers,) losses of single answers and their rewards.

    Args:
        log_ratios: (answers,) log-probability of each answer minus that by the reference, in nats.
        desirable: (answers,) bool.
        divergence: () estimate of the divergence from the reference, without a gradient.
        beta: factor of the rewards.
        weights: of a desirable and an undesirable answer.

    Source: Ethayarajh et al. (arXiv:2402.01306), section 4.
    """
    sign = torch.where(desirable, 1.0, -1.0).to(log_ratios.dtype)
    weight = torch.where(desirable, weights[0], weights[1]).to(log_ratios.dtype)
    losses = weight * (1.0 - torch.sigmoid(sign * beta * (log_ratios - divergence)))
    return losses, beta * log_ratios
