"""Shingles: the set of word n-grams by which documents are compared.

The words of a text are the matches of the regular expression \\w+ in its lower-cased form. Its
shingles are the distinct runs of n consecutive words, each as a 64-bit hash. A text of fewer words
has one shingle, which holds all its words. A text without words has no shingles, and is similar to
no other text.

The similarity of two documents is the Jaccard similarity of their sets of shingles. "Exact" means
exact up to collisions of 64-bit hashes. Two documents of 100,000 words have a collision with a
probability of one in 10^9.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Hashes = NDArray[np.uint64]
Positions = NDArray[np.int64]

CHUNK_BYTES = 8
LONGEST_CHUNKED_BYTES = 64
"""Longer words are rare, and are hashed one by one."""

WORD_BYTES = bytes(byte if chr(byte).isalnum() or byte == ord("_") else 0 for byte in range(128)).lower() + bytes(
    range(128, 256)
)
CHUNK_MASKS = np.array([(1 << 8 * num_bytes) - 1 for num_bytes in range(CHUNK_BYTES + 1)], np.uint64)
HALF, QUARTER = np.uint64(32), np.uint64(29)


def odd_factor(name: str) -> np.uint64:
    """Return a pseudo-random odd number; multiplication by it modulo 2^64 is a bijection."""
    return np.uint64(xxh3_64_intdigest(name.encode()) | 1)


WORD_FACTOR, CHUNK_FACTOR, FIRST_FACTOR, LAST_FACTOR = map(odd_factor, ("word", "chunk", "first", "last"))


class Shingles(NamedTuple):
    """Shingles of some documents, document by document."""

    hashes: Hashes
    """(shingles,) uint64, ascending and distinct within each document."""
    starts: Positions
    """(documents + 1,) int64: document i has the shingles hashes[starts[i]:starts[i + 1]]."""


def shingles_of(texts: Sequence[str], ngram: int) -> Shingles:
    """Return the shingles of texts.

    Args:
        texts: any Unicode; an unpaired surrogate ends a word.
        ngram: the number of words in a shingle.
    """
    words, num_words = hash_words([word_bytes(text) for text in texts])
    grams, num_grams = _join(words, num_words, ngram)
    return _distinct(grams, _starts(num_grams))


def jaccard(first: Hashes, second: Hashes) -> float:
    """Return the Jaccard similarity of two sets of shingles, each ascending and distinct."""
    together = np.concatenate((first, second))
    # A stable sort merges the two ascending runs in linear time.
    together.sort(kind="stable")
    num_common = int(np.count_nonzero(together[1:] == together[:-1]))
    return num_common / max(1, len(together) - num_common)


def word_bytes(text: str) -> bytes:
    """Return the lower-cased words of a text in UTF-8, with zero bytes for all other characters."""
    if text.isascii():
        return text.encode().translate(WORD_BYTES)
    points = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), "<u4")
    return np.where(_word_points()[points], points, 0).astype("<u4").tobytes().decode("utf-32-le").encode()


@cache
def _word_points() -> NDArray[np.bool_]:
    """Return for every code point whether \\w matches it: (code points,) bool."""
    return np.array([chr(point).isalnum() or point == ord("_") for point in range(0x110000)])


def hash_words(texts: Sequence[bytes]) -> tuple[Hashes, Positions]:
    """Return the hashes of the words of all texts, and the number of words of each text.

    Args:
        texts: words that are separated by zero bytes.
    """
    # One zero byte before the first word and eight after the last let every chunk be read in full.
    buffer = b"\0" + b"\0".join(texts) + bytes(CHUNK_BYTES)
    is_word = np.frombuffer(buffer, np.uint8) != 0
    boundaries = np.flatnonzero(is_word[1:] != is_word[:-1]) + 1
    starts, lengths = boundaries[::2], boundaries[1::2] - boundaries[::2]
    chunks = np.ndarray((len(buffer) - CHUNK_BYTES + 1,), "<u8", buffer, strides=(1,))

    def chunk(which: Positions | slice, offset: int) -> Hashes:
        rest = np.minimum(lengths[which] - offset, CHUNK_BYTES)
        return chunks[starts[which] + offset] & CHUNK_MASKS[rest]

    hashes = chunk(slice(None), 0) * WORD_FACTOR
    hashes ^= hashes >> HALF
    longer = np.flatnonzero(lengths > CHUNK_BYTES)
    for offset in range(CHUNK_BYTES, LONGEST_CHUNKED_BYTES, CHUNK_BYTES):
        if not len(longer):
            break
        hashes[longer] = _mixed((hashes[longer] ^ (hashes[longer] << HALF)) * CHUNK_FACTOR + chunk(longer, offset))
        longer = longer[lengths[longer] > offset + CHUNK_BYTES]
    for word in longer:
        hashes[word] = xxh3_64_intdigest(buffer[starts[word] : starts[word] + lengths[word]])
    text_starts = _starts(np.array([len(text) + 1 for text in texts], np.int64)) + 1
    return hashes, np.diff(np.searchsorted(starts, text_starts))


def _join(words: Hashes, num_words: Positions, ngram: int) -> tuple[Hashes, Positions]:
    """Return the hash of every run of n words, and the number of runs of each text."""
    factors = [odd_factor(f"place {offset}") for offset in range(ngram)]
    padded = np.concatenate((words, np.zeros(ngram - 1, np.uint64)))
    grams = words * factors[0]
    for offset in range(1, ngram):
        grams += padded[offset : offset + len(words)] * factors[offset]
    starts = _starts(num_words)
    begins = np.ones(len(words), bool)
    for offset in range(1, ngram):
        last = starts[1:] - offset
        begins[last[last >= starts[:-1]]] = False
    short = np.flatnonzero((num_words > 0) & (num_words < ngram))
    first = starts[:-1][short]
    begins[first] = True
    grams[first] = words[first] * factors[0]
    for offset in range(1, ngram - 1):
        grams[first] += np.where(num_words[short] > offset, padded[first + offset] * factors[offset], np.uint64(0))
    num_grams = np.where(num_words < ngram, np.minimum(num_words, 1), num_words - ngram + 1)
    return _mixed(grams[begins]), num_grams


def _mixed(hashes: Hashes) -> Hashes:
    """Mix the bits of hashes in place by a bijection.

    Source: the finalizer of MurmurHash3, with other constants.
    """
    hashes ^= hashes >> HALF
    hashes *= FIRST_FACTOR
    hashes ^= hashes >> QUARTER
    hashes *= LAST_FACTOR
    hashes ^= hashes >> HALF
    return hashes


def _distinct(hashes: Hashes, starts: Positions) -> Shingles:
    """Return the sorted hashes of each document without repetitions; sorts the array in place."""
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        hashes[start:end].sort()
    is_new = np.ones(len(hashes), bool)
    is_new[1:] = hashes[1:] != hashes[:-1]
    is_new[starts[:-1][starts[:-1] < len(hashes)]] = True
    return Shingles(hashes[is_new], _starts(is_new)[starts])


def _starts(lengths: NDArray[np.int64] | NDArray[np.bool_]) -> Positions:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
