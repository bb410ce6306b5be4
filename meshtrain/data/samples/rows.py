"""Samples: rows of tokens and labels, which are cut from token files when they are read.

All forms have a length and `read(sample_ids)`. A FILLER id reads as a row of pads that is not
trained on.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.data.samples.order import FILLER
from meshtrain.data.samples.weights import weighted_labels
from meshtrain.data.tokens.token_file import TokenFile

Arrays = dict[str, np.ndarray]


class Samples(Protocol):
    """Something that a loader reads from."""

    def __len__(self) -> int: ...

    def lengths(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sample, (batch,) int64; a filler has 1."""
        ...

    def width(self, sample_ids: np.ndarray) -> int:
        """Return the number of columns that a batch of these samples needs."""
        ...

    def read(self, sample_ids: np.ndarray, width: int | None = None, *, with_tokens: bool = True) -> Arrays:
        """Return the rows of `sample_ids` (batch,).

        Args:
            width: number of columns, which the global batch decides; None: what these samples need.
            with_tokens: read the tokens. If not, all `input_ids` are 0, and so are the labels that
                are trained on. This is for a process that needs only the shapes, positions and
                masks.

        Returns:
            Arrays (batch, width) int64 with the argument names of the model: `input_ids` and
            `labels`, which are already shifted: labels[t] is the token after input_ids[t]. The form
            adds `position_ids`, or `attention_mask` (1: token, 0: pad). Samples of several rows are
            (batch, rows, width).
        """
        ...


def in_rows(arrays: Arrays) -> Arrays:
    """Join the rows of samples of several rows to (batch * rows, width)."""
    return {name: it.reshape(-1, it.shape[-1]) if it.ndim == 3 else it for name, it in arrays.items()}


class PackedSamples:
    """All documents one after another, cut into full sequences.

    Sample i is tokens[i * seq : i * seq + seq + 1]. Its last token is only a label, and the first
    input of sample i + 1. So every token except the very first is predicted once.

    Args:
        sequence_length: number of tokens of a sample.
        separate_documents: return `position_ids` that restart at every document. A model of
            transformers derives from them the mask that separates documents. The first token of a
            document is not predicted then.
        has_weights: whether labels carry weights: those of the documents, or 1 if these have none.
    """

    def __init__(
        self,
        tokens: TokenFile,
        sequence_length: int,
        *,
        pad_id: int,
        separate_documents: bool = False,
        has_weights: bool = False,
    ) -> None:
        self._file, self._has_weights = tokens, has_weights
        self._sequence_length, self._pad_id, self._separates = sequence_length, pad_id, separate_documents
        self._num_samples = max(0, (tokens.counts.tokens - 1) // sequence_length)

    def __len__(self) -> int:
        return self._num_samples

    def lengths(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the sequence length for each sample."""
        return np.where(sample_ids == FILLER, 1, self._sequence_length)

    def width(self, sample_ids: np.ndarray) -> int:
        """Return the sequence length."""
        return self._sequence_length

    def read(self, sample_ids: np.ndarray, width: int | None = None, *, with_tokens: bool = True) -> Arrays:
        """Return `input_ids`, `labels`, and `position_ids` if documents are separate."""
        is_filler = sample_ids == FILLER
        # A row is contiguous, so copying it is faster than one gather by indices.
        starts = np.where(is_filler, 0, sample_ids) * self._sequence_length
        shape = (len(starts), self._sequence_length + 1)
        tokens = np.zeros(shape, np.int64)
        if with_tokens:
            for row, start in zip(tokens, starts, strict=True):
                row[:] = self._file.tokens[start : start + len(row)]
        is_trained = np.ones(shape, bool)
        if self._file.trained is not None:
            for row, start in zip(is_trained, starts, strict=True):
                row[:] = self._file.trained[start : start + len(row)]
        begins = np.zeros(shape, bool)
        if self._separates:
            for row, start in zip(begins, starts, strict=True):
                first, last = np.searchsorted(self._file.offsets, (start + 1, start + len(row)))
                row[self._file.offsets[first:last] - start] = True
        arrays = packed_arrays(
            tokens, is_trained & ~begins, begins if self._separates else None, is_filler, self._pad_id
        )
        if self._has_weights:
            # The tokens that are predicted, and the documents that they belong to.
            places = starts[:, None] + np.arange(1, shape[1])
            weights = _weights_of(self._file, np.searchsorted(self._file.offsets, places, "right") - 1)
            arrays["labels"] = weighted_labels(arrays["labels"], weights)
        return arrays


def packed_arrays(
    tokens: np.ndarray, is_trained: np.ndarray, begins: np.ndarray | None, is_filler: np.ndarray, pad_id: int
) -> Arrays:
    """Turn full rows into the inputs of a model.

    Args:
        tokens: (batch, seq + 1) int64.
        is_trained: (batch, seq + 1) bool: whether to train on predicting the token.
        begins: (batch, seq + 1) bool: whether a document begins there (the first column is
            ignored); None: the documents are not separated.
        is_filler: (batch,) bool.
    """
    input_ids, labels = tokens[:, :-1].copy(), np.where(is_trained[:, 1:], tokens[:, 1:], IGNORE_INDEX)
    input_ids[is_filler], labels[is_filler] = pad_id, IGNORE_INDEX
    arrays = {"input_ids": input_ids, "labels": labels}
    if begins is not None:
        columns = np.arange(input_ids.shape[1])
        begins = begins[:, :-1] & ~is_filler[:, None]
        arrays["position_ids"] = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return arrays


class PaddedSamples:
    """One document per sample: a longer one is cut off, and a shorter one is padded.

    The end token of a document is trained on; pads are not. Pads are found by the length of a row
    and not by their token, because the pad may be the end token.

    Args:
        sequence_length: the largest number of tokens of a sample.
        pad_to_multiple_of: a batch is as wide as its longest sample, rounded up to a multiple of
            this; None: all batches are as wide as `sequence_length`.
        has_weights: as for `PackedSamples`.
    """

    def __init__(
        self,
        tokens: TokenFile,
        sequence_length: int,
        *,
        pad_id: int,
        pad_to_multiple_of: int | None = None,
        has_weights: bool = False,
    ) -> None:
        self._file, self._offsets, self._has_weights = tokens, tokens.offsets, has_weights
        self._sequence_length = sequence_length
        self._multiple = pad_to_multiple_of
        self._pad_id = pad_id

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def lengths(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens that are read of each document."""
        documents = np.where(sample_ids == FILLER, 0, sample_ids)
        lengths = np.minimum(self._offsets[documents + 1] - self._offsets[documents], self._sequence_length)
        return np.where(sample_ids == FILLER, 1, lengths)

    def width(self, sample_ids: np.ndarray) -> int:
        """Return the length of the longest sample, rounded up."""
        return padded_width(self.lengths(sample_ids), self._sequence_length, self._multiple)

    def read(self, sample_ids: np.ndarray, width: int | None = None, *, with_tokens: bool = True) -> Arrays:
        """Return `input_ids`, `attention_mask` (1: token, 0: pad) and `labels`."""
        width = width or self.width(sample_ids)
        is_filler = sample_ids == FILLER
        starts = self._offsets[np.where(is_filler, 0, sample_ids)]
        lengths = np.minimum(self.lengths(sample_ids), width)
        tokens, is_trained = np.zeros((len(starts), width), np.int64), np.ones((len(starts), width), bool)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if with_tokens:
                tokens[row, :length] = self._file.tokens[start : start + length]
            if self._file.trained is not None:
                is_trained[row, :length] = self._file.trained[start : start + length]
        arrays = padded_arrays(tokens, is_trained, lengths, is_filler, self._pad_id)
        if self._has_weights:
            weights = _weights_of(self._file, np.where(is_filler, 0, sample_ids))
            labels = arrays["labels"]
            arrays["labels"] = weighted_labels(labels, np.broadcast_to(weights[:, None], labels.shape))
        return arrays


def _weights_of(tokens: TokenFile, documents: np.ndarray) -> np.ndarray:
    """Return the weights of documents, float32, in the shape of their numbers."""
    return np.ones(documents.shape, np.float32) if tokens.weights is None else tokens.weights[documents]


def padded_width(lengths: np.ndarray, longest: int, multiple: int | None) -> int:
    """Return the width of a batch of samples of these lengths."""
    return longest if multiple is None else min(longest, -(-int(lengths.max()) // multiple) * multiple)


def padded_arrays(
    tokens: np.ndarray, is_trained: np.ndarray, lengths: np.ndarray, is_filler: np.ndarray, pad_id: int
) -> Arrays:
    """Turn rows of different lengths into the inputs of a model.

    The first position of a filler row is not masked, because attention over no position would be
    NaN.

    Args:
        tokens: (batch, width) int64; values after the length of a row do not matter.
        is_trained: (batch, width) bool: whether to train on predicting the token.
        lengths: (batch,), 1 for a filler.
    """
    is_token = np.arange(tokens.shape[1]) < lengths[:, None]
    input_ids = np.where(is_token & ~is_filler[:, None], tokens, pad_id)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    labels[:, :-1] = np.where((is_token & is_trained)[:, 1:], input_ids[:, 1:], IGNORE_INDEX)
    return {"input_ids": input_ids, "attention_mask": is_token.astype(np.int64), "labels": labels}


class MixedSamples:
    """The samples of several sources; the ids of a source follow those of the one before it.

    All sources have the same form, so that their rows have the same arrays.
    """

    def __init__(self, parts: Sequence[Samples]) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def lengths(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the lengths, each from its source."""
        lengths = np.ones(len(sample_ids), np.int64)
        for part, rows, own_ids in self._split(sample_ids):
            lengths[rows] = part.lengths(own_ids)
        return lengths

    def width(self, sample_ids: np.ndarray) -> int:
        """Return the largest width that any source needs."""
        return max(part.width(own_ids) for part, _, own_ids in self._split(sample_ids))

    def read(self, sample_ids: np.ndarray, width: int | None = None, *, with_tokens: bool = True) -> Arrays:
        """Return the rows of all sources, in the order of the ids."""
        width = width or self.width(sample_ids)
        arrays: Arrays = {}
        for part, rows, own_ids in self._split(sample_ids):
            for name, values in part.read(own_ids, width, with_tokens=with_tokens).items():
                shape = (len(sample_ids), *values.shape[1:])
                arrays.setdefault(name, np.empty(shape, values.dtype))[rows] = values
        return arrays

    def _split(self, sample_ids: np.ndarray) -> list[tuple[Samples, np.ndarray, np.ndarray]]:
        """Return each source with any of the samples, their rows, and their ids within it.

        The first has the fillers.
        """
        numbers = np.where(sample_ids == FILLER, 0, np.searchsorted(self._ends, sample_ids, "right"))
        found = []
        for number in np.unique(numbers):
            rows = np.flatnonzero(numbers == number)
            before = self._ends[number - 1] if number else 0
            own_ids = np.where(sample_ids[rows] == FILLER, FILLER, sample_ids[rows] - before)
            found.append((self._parts[number], rows, own_ids))
        return found
