"""Samples with what a reference model says about them."""

import numpy as np

from meshtrain.data.samples.order import FILLER
from meshtrain.data.samples.rows import Arrays, Samples

REFERENCE = "reference"


class ReferencedSamples:
    """Samples whose rows have log-probabilities by a reference model.

    Args:
        samples: of judged answers.
        log_probs: (samples, 2) float64, in nats: of the two answers of a pair, or of an answer and
            the mismatched one beside it.
    """

    def __init__(self, samples: Samples, log_probs: np.ndarray) -> None:
        assert log_probs.shape == (len(samples), 2), f"{log_probs.shape} for {len(samples)} samples"
        self._samples, self._log_probs = samples, log_probs

    def __len__(self) -> int:
        return len(self._samples)

    def lengths(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the lengths of the samples."""
        return self._samples.lengths(sample_ids)

    def width(self, sample_ids: np.ndarray) -> int:
        """Return the width of the samples."""
        return self._samples.width(sample_ids)

    def read(self, sample_ids: np.ndarray, width: int | None = None, *, with_tokens: bool = True) -> Arrays:
        """Return the rows, and `reference` (batch, 2), which is 0 for a filler."""
        arrays = self._samples.read(sample_ids, width, with_tokens=with_tokens)
        is_filler = sample_ids == FILLER
        found = self._log_probs[np.where(is_filler, 0, sample_ids)]
        return {**arrays, REFERENCE: np.where(is_filler[:, None], 0.0, found)}
