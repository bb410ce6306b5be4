"""Scanning: one pass over tokens on disk, that counts and checks what is there and not what was meant to be written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from meshtrain import console
from meshtrain.errors import DataError

TOKENS_PER_READ = 1 << 22
MIN_PROGRESS_BYTES = 1 << 30


@dataclass(frozen=True)
class Scan:
    """What the tokens of a file are."""

    unigram_entropy_nats: float
    ended_documents: int
    """Documents whose last token is the end token."""
    tokens_hash: str
    documents_hash: str


def scan_tokens(
    path: Path,
    token_type: np.dtype,
    offsets: np.ndarray,
    *,
    vocab_size: int,
    end_id: int,
    advance: Callable[[int], None],
) -> Scan:
    """Read all tokens and borders of documents once.

    Args:
        path: the file that holds the tokens and nothing else.
        offsets: (documents + 1,) int64: where documents start, and the number of tokens.
        advance: is told how many bytes were read.

    Raises:
        DataError: a token that the vocabulary does not have, with its place.
    """
    frequencies = np.zeros(vocab_size, np.int64)
    token_hash, document_hash = xxh3_128(), xxh3_128()
    for first in range(0, len(offsets), TOKENS_PER_READ):
        document_hash.update(offsets[first : first + TOKENS_PER_READ].data)
    start = ended_documents = 0
    # Read, not mapped: a map of the whole file would count as memory of this process.
    with path.open("rb") as stream:
        while (part := np.fromfile(stream, token_type, TOKENS_PER_READ)).size:
            _check_range(path, part, start, vocab_size)
            frequencies += np.bincount(part, minlength=vocab_size)
            token_hash.update(part.data)
            borders = np.asarray(offsets[slice(*np.searchsorted(offsets, (start + 1, start + part.size + 1)))])
            ended_documents += int((part[borders - start - 1] == end_id).sum())
            start += part.size
            advance(part.nbytes)
    return Scan(_entropy_nats(frequencies), ended_documents, token_hash.hexdigest(), document_hash.hexdigest())


@contextmanager
def progress_if_long(description: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of reading so many bytes, if that takes long enough to be wondered at."""
    if num_bytes < MIN_PROGRESS_BYTES:
        yield lambda _: None
        return
    with console.progress(description, num_bytes, unit="MB") as advance:
        yield advance


def scan_trained_mask(path: Path) -> tuple[int, str]:
    """Return how many tokens are marked as trained on, and the hash of the file of marks."""
    num_tokens, hashed = 0, xxh3_128()
    with path.open("rb") as stream:
        while (part := np.fromfile(stream, np.bool_, TOKENS_PER_READ)).size:
            num_tokens += int(part.sum())
            hashed.update(part.data)
    return num_tokens, hashed.hexdigest()


def _check_range(path: Path, part: np.ndarray, start: int, vocab_size: int) -> None:
    is_wrong = (part >= vocab_size) | (part < 0)
    if is_wrong.any():
        place = int(is_wrong.argmax())
        raise DataError(
            f"{path}: token {start + place:,} (byte {(start + place) * part.itemsize:,}) is {int(part[place]):,}, "
            f"and the tokenizer has 0 to {vocab_size - 1:,}; name the tokenizer that it was written with as "
            "data.tokenizer.path, or tokenize again"
        )


def _entropy_nats(frequencies: np.ndarray) -> float:
    probabilities = frequencies[frequencies > 0] / frequencies.sum()
    return float(-(probabilities * np.log(probabilities)).sum())
