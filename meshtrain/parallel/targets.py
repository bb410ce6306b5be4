"""The labels that a loss of transformers takes: those of the next tokens."""

import torch.nn.functional as F
from torch import Tensor


def next_tokens(
    labels: Tensor, shift_labels: Tensor | None, num_items_in_batch: Tensor | int | None, ignore_index: int
) -> tuple[Tensor, Tensor | int]:
    """Return the label of the next token at each position, and what the loss divides by.

    Args:
        labels: (batch, seq), as a class takes them.
        shift_labels: (batch, seq) of the next tokens, which replace them.
        num_items_in_batch: what the loss divides by; None: the number of labels that count.
        ignore_index: of labels that do not count.

    Returns:
        (batch, seq) labels, and the number, which is at least 1 if it is counted here.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != ignore_index).sum().clamp(min=1)
    return shift_labels, num_items_in_batch
