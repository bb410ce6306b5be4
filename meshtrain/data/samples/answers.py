"""Samples of judged answers: pairs, and single ones with a mismatched answer beside each."""

import numpy as np

from meshtrain.data.samples.order import FILLER
from meshtrain.data.samples.rows import Arrays, PaddedSamples, padded_arrays, padded_width
from meshtrain.data.tokens.token_file import TokenFile

CHOSEN, REJECTED = 0, 1
"""Rows of a pair."""
MISMATCHED = "mismatched_"
"""Prefix of the arrays of mismatched answers."""
DESIRABLE = "desirable"


class PairSamples:
    """Two padded rows per sample: a prompt with its chosen answer, and with its rejected one.

    Their arrays are (batch, 2, width).

    Args:
        documents: of a token file, in which the answers of a pair follow each other.
    """

    def __init__(self, documents: PaddedSamples) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents) // 2

    def lengths(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of the longer row of each pair."""
        return self._documents.lengths(_rows(sample_ids)).reshape(-1, 2).max(1)

    def width(self, sample_ids: np.ndarray) -> int:
        """Return the length of the longest row, rounded up."""
        return self._documents.width(_rows(sample_ids))

    def read(self, sample_ids: np.ndarray, width: int | None = None, *, with_tokens: bool = True) -> Arrays:
        """Return `input_ids`, `attention_mask` and `labels` (batch, 2, width)."""
        arrays = self._documents.read(_rows(sample_ids), width, with_tokens=with_tokens)
        return {name: array.reshape(-1, 2, array.shape[-1]) for name, array in arrays.items()}


def _rows(sample_ids: np.ndarray) -> np.ndarray:
    """Return the documents of pairs, (2 * batch,)."""
    first = np.where(sample_ids == FILLER, FILLER, 2 * sample_ids)
    second = np.where(sample_ids == FILLER, FILLER, 2 * sample_ids + 1)
    return np.stack([first, second], 1).reshape(-1)


class JudgedSamples:
    """One padded row per sample: a prompt with an answer that is desirable or not.

    Beside it is another row: the same prompt with the answer of the sample before. On such rows,
    KTO measures how far the model is from its reference.

    Args:
        tokens: the first mark of a document says whether its answer is desirable.
        sequence_length: the largest number of tokens of a sample.
        pad_to_multiple_of: as for `PaddedSamples`.

    Source: Ethayarajh et al. (arXiv:2402.01306), section 4.
    """

    def __init__(
        self, tokens: TokenFile, sequence_length: int, *, pad_id: int, pad_to_multiple_of: int | None = None
    ) -> None:
        assert tokens.trained is not None, "answers have marks"
        self._own = PaddedSamples(tokens, sequence_length, pad_id=pad_id, pad_to_multiple_of=pad_to_multiple_of)
        self._file, self._marks = tokens, tokens.trained
        self._sequence_length, self._multiple, self._pad_id = sequence_length, pad_to_multiple_of, pad_id

    def __len__(self) -> int:
        return len(self._own)

    def lengths(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sample with its own answer."""
        return self._own.lengths(sample_ids)

    def width(self, sample_ids: np.ndarray) -> int:
        """Return the length of the longest row, mismatched ones included, rounded up."""
        lengths = [sum(len(range(*part)) for part in self._parts(it)) for it in sample_ids if it != FILLER]
        longest = np.minimum(np.array([1, *lengths]), self._sequence_length)
        return max(self._own.width(sample_ids), padded_width(longest, self._sequence_length, self._multiple))

    def read(self, sample_ids: np.ndarray, width: int | None = None, *, with_tokens: bool = True) -> Arrays:
        """Return the arrays of the own rows, those of the mismatched ones, and `desirable`.

        `desirable` (batch,) bool is false for a filler.
        """
        width = width or self.width(sample_ids)
        own = self._own.read(sample_ids, width, with_tokens=with_tokens)
        mismatched = self._mismatched(sample_ids, width, with_tokens=with_tokens)
        is_filler = sample_ids == FILLER
        firsts = self._file.offsets[np.where(is_filler, 0, sample_ids)]
        return {
            **own,
            **{f"{MISMATCHED}{name}": array for name, array in mismatched.items()},
            DESIRABLE: np.asarray(self._marks[firsts]) & ~is_filler,
        }

    def _mismatched(self, sample_ids: np.ndarray, width: int, *, with_tokens: bool) -> Arrays:
        shape = (len(sample_ids), width)
        tokens, is_trained, lengths = np.zeros(shape, np.int64), np.ones(shape, bool), np.ones(len(sample_ids), int)
        for row, sample_id in enumerate(sample_ids):
            if sample_id == FILLER:
                continue
            at = 0
            for start, end in self._parts(sample_id):
                stop = min(at + end - start, width)
                if with_tokens:
                    tokens[row, at:stop] = self._file.tokens[start : start + stop - at]
                is_trained[row, at:stop] = self._marks[start : start + stop - at]
                at = stop
            lengths[row] = at
        return padded_arrays(tokens, is_trained, lengths, sample_ids == FILLER, self._pad_id)

    def _parts(self, sample_id: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return where the prompt of a sample is in the file, and the answer of the one before."""
        other = (sample_id - 1) % len(self)
        start = int(self._file.offsets[sample_id])
        return (start, self._answer(sample_id)), (self._answer(other), int(self._file.offsets[other + 1]))

    def _answer(self, sample_id: int) -> int:
        """Return where an answer begins in the file; the document begins with its prompt."""
        start, end = (int(it) for it in self._file.offsets[sample_id : sample_id + 2])
        return start + 1 + int(np.argmax(self._marks[start + 1 : end]))


def count_without_answer(tokens: TokenFile, sequence_length: int) -> int:
    """Return the number of documents whose prompt leaves no token of the answer within a sample."""
    assert tokens.trained is not None, "answers have marks"
    found = 0
    for document in np.flatnonzero(np.diff(tokens.offsets) > sequence_length):
        start = int(tokens.offsets[document])
        found += not tokens.trained[start + 1 : start + sequence_length].any()
    return found
