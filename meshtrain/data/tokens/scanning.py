"""Scanning: one pass over the tokens on disk, which counts and checks what was really written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from meshtrain import console
from meshtrain.data.tokens.tokenizer import TokenizerFiles
from meshtrain.errors import DataError, Problem

TOKENS_PER_READ = 1 << 22
MIN_PROGRESS_BYTES = 1 << 30


@dataclass(frozen=True)
class Scan:
    """The result of a scan."""

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
    tokenizer: TokenizerFiles,
    advance: Callable[[int], None],
) -> Scan:
    """Read all tokens and all document borders once.

    Args:
        path: a file that holds tokens and nothing else.
        offsets: (documents + 1,) int64: the first token of each document, then the number of
            tokens.
        tokenizer: the one that the tokens should be of.
        advance: receives the number of bytes that were read since the last call.

    Raises:
        DataError: if a token is not in the vocabulary; names its position.
    """
    frequencies = np.zeros(tokenizer.vocab_size, np.int64)
    token_hash, document_hash = xxh3_128(), xxh3_128()
    for first in range(0, len(offsets), TOKENS_PER_READ):
        document_hash.update(offsets[first : first + TOKENS_PER_READ].data)
    start = ended_documents = 0
    # The file is read and not mapped: a map of the full file would count as memory of this process.
    with path.open("rb") as stream:
        while (part := np.fromfile(stream, token_type, TOKENS_PER_READ)).size:
            _check_range(path, part, start, tokenizer)
            frequencies += np.bincount(part, minlength=tokenizer.vocab_size)
            token_hash.update(part.data)
            borders = np.asarray(offsets[slice(*np.searchsorted(offsets, (start + 1, start + part.size + 1)))])
            ended_documents += int((part[borders - start - 1] == tokenizer.end_id).sum())
            start += part.size
            advance(part.nbytes)
    return Scan(_entropy_nats(frequencies), ended_documents, token_hash.hexdigest(), document_hash.hexdigest())


@contextmanager
def progress_if_long(description: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of reading a file, if it is large enough to take long."""
    if num_bytes < MIN_PROGRESS_BYTES:
        yield lambda _: None
        return
    with console.progress(description, num_bytes, unit="MB") as advance:
        yield advance


def scan_trained_mask(path: Path) -> tuple[int, str]:
    """Return the number of tokens that are trained on, and the hash of the file that marks them."""
    num_tokens, hashed = 0, xxh3_128()
    with path.open("rb") as stream:
        while (part := np.fromfile(stream, np.bool_, TOKENS_PER_READ)).size:
            num_tokens += int(part.sum())
            hashed.update(part.data)
    return num_tokens, hashed.hexdigest()


def hash_of(path: Path) -> str:
    """Return the hash of a file that is small beside the tokens."""
    return xxh3_128(path.read_bytes()).hexdigest()


def _check_range(path: Path, part: np.ndarray, start: int, tokenizer: TokenizerFiles) -> None:
    is_wrong = (part >= tokenizer.vocab_size) | (part < 0)
    if is_wrong.any():
        index = int(is_wrong.argmax())
        position = start + index
        raise DataError(
            Problem(
                f"{path}: token {position:,} (byte {position * part.itemsize:,}) is {int(part[index]):,}, "
                f"and the tokenizer has 0 to {tokenizer.vocab_size - 1:,}",
                f"name the tokenizer that it was written with as {tokenizer.setting}, or tokenize again",
            )
        )


def _entropy_nats(frequencies: np.ndarray) -> float:
    probabilities = frequencies[frequencies > 0] / frequencies.sum()
    return float(-(probabilities * np.log(probabilities)).sum())
