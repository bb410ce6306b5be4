"""Shingles: the set of word n-grams by which documents are compared.

The words of a text are the matches of the regular expression \\w+ in its lower-cased form. Its shingles are the
distinct runs of n consecutive words, each as a 64-bit hash. A text of fewer words has one shingle, all its words; a
text without any word has none, and is similar to nothing.

The similarity of two documents is the Jaccard similarity of their sets of shingles. Where it is called exact, it is so
up to collisions of 64-bit hashes: for two documents of 100,000 words each, a chance of one in 10^9.
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
"""Longer words, which are rare, are hashed one by one."""

WORD_BYTES = bytes(byte if chr(byte).isalnum() or byte == ord("_") else 0 for byte in range(128)).lower() + bytes(
    range(128, 256)
)
CHUNK_MASKS = np.array([(1 << 8 * num_bytes) - 1 for num_bytes in range(CHUNK_BYTES + 1)], np.uint64)
HALF, QUARTER = np.uint64(32), np.uint64(29)


def odd_factor(name: str) -> np.uint64:
    """Return an odd number that looks random: to multiply by it modulo 2^64 can be undone, and loses nothing."""
    return np.uint64(xxh3_64_intdigest(name.encode()) | 1)


WORD_FACTOR, CHUNK_FACTOR, FIRST_FACTOR, LAST_FACTOR = map(odd_factor, ("word", "chunk", "first", "last"))


class Shingles(NamedTuple):
    """The shingles of some documents, one document after the other."""

    hashes: Hashes
    """(shingles,) uint64, ascending and distinct within each document"""
    starts: Positions
    """(documents + 1,) int64: those of document i are hashes[starts[i]:starts[i + 1]]"""


def shingles_of(texts: Sequence[str], ngram: int) -> Shingles:
    """Return the shingles of texts.

    Args:
        texts: any Unicode; half surrogate pairs end a word.
        ngram: the number of words in a shingle.
    """
    words, num_words = hash_words([word_bytes(text) for text in texts])
    grams, num_grams = _join(words, num_words, ngram)
    return _distinct(grams, _starts(num_grams))


def jaccard(first: Hashes, second: Hashes) -> float:
    """Return the Jaccard similarity of two sets of shingles, each ascending and distinct."""
    together = np.concatenate((first, second))
    # Two ascending runs: this sorting merges them.
    together.sort(kind="stable")
    num_common = int(np.count_nonzero(together[1:] == together[:-1]))
    return num_common / max(1, len(together) - num_common)


def word_bytes(text: str) -> bytes:
    """Return the lower-cased words of a text in UTF-8, with zero bytes for all that is between them."""
    if text.isascii():
        return text.encode().translate(WORD_BYTES)
    points = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), "<u4")
    return np.where(_word_points()[points], points, 0).astype("<u4").tobytes().decode("utf-32-le").encode()


@cache
def _word_points() -> NDArray[np.bool_]:
    """Tell for every code point whether \\w matches it."""
    return np.array([chr(point).isalnum() or point == ord("_") for point in range(0x110000)])


def hash_words(texts: Sequence[bytes]) -> tuple[Hashes, Positions]:
    """Return the hashes of the words of all texts, and how many words each text has.

    Args:
        texts: words between zero bytes.
    """
    # A zero byte before the first word and eight after the last: every chunk of a word can be read as a whole.
    buffer = b"\0" + b"\0".join(texts) + bytes(CHUNK_BYTES)
    is_word = np.frombuffer(buffer, np.uint8) != 0
    borders = np.flatnonzero(is_word[1:] != is_word[:-1]) + 1
    starts, lengths = borders[::2], borders[1::2] - borders[::2]
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
    """Return a hash of every run of n words within a text, and how many runs each text has."""
    factors = [odd_factor(f"place {place}") for place in range(ngram)]
    padded = np.concatenate((words, np.zeros(ngram - 1, np.uint64)))
    grams = words * factors[0]
    for place in range(1, ngram):
        grams += padded[place : place + len(words)] * factors[place]
    starts = _starts(num_words)
    begins = np.ones(len(words), bool)
    for place in range(1, ngram):
        last = starts[1:] - place
        begins[last[last >= starts[:-1]]] = False
    short = np.flatnonzero((num_words > 0) & (num_words < ngram))
    first = starts[:-1][short]
    begins[first] = True
    grams[first] = words[first] * factors[0]
    for place in range(1, ngram - 1):
        grams[first] += np.where(num_words[short] > place, padded[first + place] * factors[place], np.uint64(0))
    num_grams = np.where(num_words < ngram, np.minimum(num_words, 1), num_words - ngram + 1)
    return _mixed(grams[begins]), num_grams


def _mixed(hashes: Hashes) -> Hashes:
    """Spread every bit over all: a bijection (the finaliser of MurmurHash3 with other constants)."""
    hashes ^= hashes >> HALF
    hashes *= FIRST_FACTOR
    hashes ^= hashes >> QUARTER
    hashes *= LAST_FACTOR
    hashes ^= hashes >> HALF
    return hashes


def _distinct(hashes: Hashes, starts: Positions) -> Shingles:
    """Sort the hashes of each document, and leave out repetitions; the array is sorted in place."""
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        hashes[start:end].sort()
    is_new = np.ones(len(hashes), bool)
    is_new[1:] = hashes[1:] != hashes[:-1]
    is_new[starts[:-1][starts[:-1] < len(hashes)]] = True
    return Shingles(hashes[is_new], _starts(is_new)[starts])


def _starts(lengths: NDArray[np.int64] | NDArray[np.bool_]) -> Positions:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
