"""A loss of the program's own, which is the same on every mesh because it is a sum over tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshtrain.config.arguments import described, wrong
from meshtrain.config.data import IGNORE_INDEX
from meshtrain.errors import ConfigError
from meshtrain.parallel.head.chunks import LossFunction
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.tensor.collectives import gather_vocabulary
from meshtrain.training.loss import MeanLoss, TokenLoss, vocabulary_of, widened

ROWS, COLUMNS = 2, 3
IGNORED = slice(0, 1), slice(1, 2)
"""The token without a label."""
CLOSE = 1e-4
"""Difference of two sums that is rounding in float32, relative to the sum of the sizes."""
ADVICE = f"return the sum over the tokens whose label is not {IGNORE_INDEX}; it is divided by their number"


@dataclass(frozen=True)
class OwnLoss(TokenLoss):
    """A loss of the program's own.

    Attributes:
        function: returns the () sum over the trained tokens of logits (batch, seq, vocab), in at
            least float32, and labels (batch, seq), which are shifted already.
    """

    function: LossFunction

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the () sum over the trained tokens; the arguments are those of `TokenLoss`."""
        if self.group is not None:
            logits = gather_vocabulary(logits, self.vocabulary, self.group)
        return self.function(widened(logits), labels)

    def mean_over(self, num_tokens: Tensor, *, scale: float = 1.0) -> MeanLoss:
        """Return the loss function of one step; the arguments are those of `TokenLoss`."""
        return MeanLoss(self.total, num_tokens.clamp(min=1), scale)


def build_own_loss(pipeline: Pipeline, function: LossFunction) -> OwnLoss:
    """Return a loss of the program's own, for logits as the last stage returns them."""
    return OwnLoss(*vocabulary_of(pipeline), function)


def check_own_loss(asked: str, function: Any, vocabulary: int) -> None:
    """Check on six tokens that a loss is a sum over the trained ones.

    Microbatches, chunks and processes have other parts of a batch on every mesh, and their losses
    are added up.

    Args:
        asked: name of the argument, as "function: argument".
        function: what the program has passed.
        vocabulary: number of logits of a token.

    Raises:
        ConfigError: if it is not.
    """
    if not callable(function):
        raise wrong(asked, function, "a function of logits and labels")
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, COLUMNS, vocabulary, generator=stream).requires_grad_()
    labels = torch.randint(0, vocabulary, (ROWS, COLUMNS), generator=stream)
    labels[IGNORED] = IGNORE_INDEX
    whole = function(logits, labels)
    if not isinstance(whole, Tensor) or whole.dim() or not whole.requires_grad:
        found = described(whole) if not isinstance(whole, Tensor) else f"a tensor of the shape {tuple(whole.shape)}"
        reason = " without a gradient" if isinstance(whole, Tensor) and not whole.dim() else ""
        raise ConfigError(f"{asked} returns {found}{reason} for logits {tuple(logits.shape)}", ADVICE)
    total, values = float(whole.detach()), logits.detach()
    cells = [(slice(row, row + 1), slice(column, column + 1)) for row in range(ROWS) for column in range(COLUMNS)]
    each = [float(function(values[cell], labels[cell])) for cell in cells]
    if not abs(total - sum(each)) <= CLOSE * sum(map(abs, each)):
        raise ConfigError(
            f"{asked} is {total:.6g} for {len(cells)} tokens, one of them with the label {IGNORE_INDEX}, and "
            f"{sum(each):.6g} in total for each of them alone, so it would depend on the mesh",
            ADVICE,
        )
    if ignored := each[cells.index(IGNORED)]:
        raise ConfigError(f"{asked} is {ignored:.6g} for a token with the label {IGNORE_INDEX}", ADVICE)
