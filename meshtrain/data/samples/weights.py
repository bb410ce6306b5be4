"""Labels that carry the weight of their token.

A label needs 32 of its 64 bits. The bits of the weight, a float32 that is not negative, are the
others. So weights travel with the labels through microbatches, parts of sequences, pipelines and
chunks, and nothing else has to know of them.
"""

import numpy as np

from meshtrain.config.data import IGNORE_INDEX

BITS = 32
TOKEN = (1 << BITS) - 1
"""The bits of a label that are those of the token."""


def weighted_labels(labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return labels with weights. Those that do not count stay as they are.

    Args:
        labels: (batch, seq) int64.
        weights: of the same shape, 0 or more; they are rounded to float32.
    """
    bits = weights.astype(np.float32).view(np.int32).astype(np.int64) << BITS
    return np.where(labels == IGNORE_INDEX, labels, labels | bits)


def tokens_of_labels(labels: np.ndarray) -> np.ndarray:
    """Return labels without their weights, if they have any."""
    return np.where(labels == IGNORE_INDEX, labels, labels & TOKEN)
