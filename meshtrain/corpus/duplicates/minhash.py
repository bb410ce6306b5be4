"""MinHash signatures, and the bands that put similar documents into the same bucket.

A MinHash of a document is the smallest value of one hash function over its shingles. Two documents
have the same MinHash with a probability that equals their Jaccard similarity. A signature is the
MinHashes of many hash functions. It is cut into bands, and documents that agree in all MinHashes of
a band share a bucket.

Source: Broder, On the resemblance and containment of documents (1997); Leskovec, Rajaraman, Ullman,
Mining of Massive Datasets, section 3.4.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from meshtrain.config.corpus import DeduplicateConfig
from meshtrain.corpus.duplicates.shingles import Hashes, Shingles, odd_factor

RECALL_AT_SIMILARITY = 0.98
MAX_HASHES = 128
MAX_ROWS = 16
DEVIATIONS = 3
"""An estimated similarity may be this number of standard deviations below the threshold."""


@dataclass(frozen=True)
class Bands:
    """How a signature is cut into bands of `rows` MinHashes.

    Documents of similarity s share a bucket with the probability 1 - (1 - s^rows)^num_bands.
    """

    num_bands: int
    rows: int

    @property
    def num_hashes(self) -> int:
        """Length of a signature."""
        return self.num_bands * self.rows

    def probability(self, similarity: float) -> float:
        """Return the probability that two documents of this similarity share a bucket."""
        return 1 - (1 - similarity**self.rows) ** self.num_bands

    def least_agreement(self, similarity: float) -> int:
        """Return the number of MinHashes that all but one in 700 pairs of this similarity share."""
        deviation = math.sqrt(self.num_hashes * similarity * (1 - similarity))
        return math.floor(self.num_hashes * similarity - DEVIATIONS * deviation)


def choose_bands(config: DeduplicateConfig) -> Bands:
    """Return the bands that the settings ask for, or the most selective ones within 128 MinHashes.

    Chosen bands find 98% of the pairs at the threshold. With more rows in a band, fewer dissimilar
    pairs share a bucket, but the same recall needs more bands.
    """
    if config.hashes_per_bucket:
        rows = config.hashes_per_bucket
        return Bands(config.num_buckets or _enough_bands(config.similarity, rows), rows)
    if config.num_buckets:
        return Bands(config.num_buckets, _most_rows(config.similarity, config.num_buckets))
    choices = (Bands(_enough_bands(config.similarity, rows), rows) for rows in range(1, MAX_ROWS + 1))
    return max((bands for bands in choices if bands.num_hashes <= MAX_HASHES), key=lambda bands: bands.rows)


def _enough_bands(similarity: float, rows: int) -> int:
    shared = similarity**rows
    return 1 if shared == 1 else math.ceil(math.log(1 - RECALL_AT_SIMILARITY) / math.log1p(-shared))


def _most_rows(similarity: float, num_bands: int) -> int:
    fits = [rows for rows in range(1, MAX_ROWS + 1) if _enough_bands(similarity, rows) <= num_bands]
    return max(fits, default=1)


class MinHasher:
    """Computes signatures with fixed hash functions, which are the same on every machine."""

    def __init__(self, bands: Bands) -> None:
        self._bands = bands
        draws = [xxh3_64_intdigest(f"minhash {number}".encode()) for number in range(bands.num_hashes)]
        self._factors = [np.uint32(draw & 0xFFFFFFFF | 1) for draw in draws]
        self._summands = [np.uint32(draw >> 32) for draw in draws]

    def signatures(self, shingles: Shingles) -> NDArray[np.uint32]:
        """Return signatures: (documents, hashes) uint32, zeros for a document without shingles."""
        signatures = np.zeros((len(shingles.starts) - 1, self._bands.num_hashes), np.uint32)
        has_any = np.flatnonzero(np.diff(shingles.starts))
        if not len(has_any):
            return signatures
        starts = shingles.starts[has_any]
        halves = (shingles.hashes >> np.uint64(32)).astype(np.uint32)
        values = np.empty_like(halves)
        smallest = np.empty((self._bands.num_hashes, len(starts)), np.uint32)
        for number, (factor, summand) in enumerate(zip(self._factors, self._summands, strict=True)):
            # Multiplication by an odd factor permutes the values modulo 2^32.
            np.multiply(halves, factor, out=values)
            np.add(values, summand, out=values)
            np.minimum.reduceat(values, starts, out=smallest[number])
        signatures[has_any] = smallest.T
        return signatures

    def bucket_keys(self, signatures: NDArray[np.uint32]) -> Hashes:
        """Return bucket keys: (documents, bands) uint64, equal where documents share a bucket."""
        bands = signatures.reshape(len(signatures), self._bands.num_bands, self._bands.rows)
        keys = np.zeros(bands.shape[:2], np.uint64)
        for row in range(self._bands.rows):
            keys ^= bands[:, :, row]
            keys *= odd_factor(f"row {row}")
            keys ^= keys >> np.uint64(32)
        return keys
