"""Samples: fixed rows of tokens and labels, cut from a token file where they are needed.

Both forms have a length and `read(sample_ids)`; a FILLER id reads as a row of pads on which nothing is trained.
"""

from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from meshtrain.data.token_file import TokenFile

IGNORE_INDEX = -100
"""The label of a position that is not trained on; the default `ignore_index` of torch's cross-entropy."""


class Samples(Protocol):
    """What a loader reads from."""

    def __len__(self) -> int: ...

    def read(self, sample_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows of `sample_ids` (batch,): each array is (batch, seq) int64, under the model's name for it."""
        ...


class PackedSamples:
    """All documents joined by the end token and cut into full sequences.

    Sample i is tokens[i * seq : i * seq + seq + 1]: its last token is only a label, and the first input of sample
    i + 1, so that every token but the very first is predicted once.
    """

    def __init__(self, tokens: TokenFile, sequence_length: int, *, pad_id: int) -> None:
        self._pad_id = pad_id
        num_samples = max(0, (tokens.counts.tokens - 1) // sequence_length)
        stride = tokens.tokens.itemsize
        # Overlapping rows over the same bytes: reading a batch is one gather of whole rows.
        self._rows = as_strided(
            tokens.tokens, (num_samples, sequence_length + 1), (stride * sequence_length, stride), writeable=False
        )

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, sample_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return `input_ids` and `labels`, already shifted: labels[t] is the token after input_ids[t]."""
        is_filler = sample_ids < 0
        rows = self._rows[np.where(is_filler, 0, sample_ids)]
        input_ids, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        input_ids[is_filler], labels[is_filler] = self._pad_id, IGNORE_INDEX
        return {"input_ids": input_ids, "labels": labels}


class PaddedSamples:
    """One document per sample: what is too long is cut off, what is too short is filled with pads.

    The document's own end token is trained on; pads are not, and neither is anything after the last token of a row.
    Which positions are pads follows from the length and not from the token, because the pad may be the end token.
    """

    def __init__(self, tokens: TokenFile, sequence_length: int, *, pad_id: int) -> None:
        self._tokens, self._offsets = tokens.tokens, tokens.offsets
        self._sequence_length = sequence_length
        self._pad_id = pad_id

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, sample_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return `input_ids`, `attention_mask` (1: token, 0: pad) and `labels`, already shifted.

        The first position of a filler row is not masked: attention over nothing at all would be NaN.
        """
        is_filler = sample_ids < 0
        documents = np.where(is_filler, 0, sample_ids)
        starts = self._offsets[documents]
        lengths = np.where(is_filler, 1, np.minimum(self._offsets[documents + 1] - starts, self._sequence_length))
        positions = np.arange(self._sequence_length)
        is_token = positions < lengths[:, None]
        gathered = self._tokens[np.where(is_token, starts[:, None] + positions, 0)].astype(np.int64)
        input_ids = np.where(is_token & ~is_filler[:, None], gathered, self._pad_id)
        labels = np.full_like(input_ids, IGNORE_INDEX)
        labels[:, :-1] = np.where(is_token[:, 1:], input_ids[:, 1:], IGNORE_INDEX)
        return {"input_ids": input_ids, "attention_mask": is_token.astype(np.int64), "labels": labels}
