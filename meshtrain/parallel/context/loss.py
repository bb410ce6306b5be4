"""The loss of a class, from the logits of a part of the sequences."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.parallel.context.parts import ContextParallel
from meshtrain.parallel.targets import next_tokens


class LossOfParts:
    """Replaces the loss of transformers in a model whose head computes a part of the sequences.

    Args:
        context: the parts of this process.
        shifts: whether the loss leaves out the first label of each row.

    Attributes:
        is_called: whether the class has called it.
    """

    def __init__(self, context: ContextParallel, *, shifts: bool) -> None:
        self._context, self._shifts = context, shifts
        self.is_called = False

    def __call__(
        self,
        stock: Callable[..., Tensor],
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the loss that transformers computes from all logits, the same on all processes.

        Args:
            stock: transformers' loss.
            logits: (batch, seq/cp, vocab)

        The other arguments are those of `stock`, for full sequences. Without any label that counts
        the loss is 0.
        """
        self.is_called = True
        given = shift_labels if self._shifts else labels
        targets, number = next_tokens(labels, given, num_items_in_batch, ignore_index)
        own = self._context.own(targets)
        share = stock(
            logits,
            labels=own,
            vocab_size=vocab_size,
            num_items_in_batch=number,
            ignore_index=ignore_index,
            shift_labels=own,
            **kwargs,
        )
        return self._context.summed(share)
