"""Buckets: which documents share a bucket, and which documents a chain of shared buckets connects.

Each band puts a document into one bucket, named by its key (see `minhash.py`). Only buckets with
several documents are kept, as entries: pairs of a bucket number and a document number.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshtrain.corpus.duplicates.shingles import Hashes, Positions
from meshtrain.corpus.duplicates.sketches import Sketches

KEYS_AT_ONCE = 1 << 23
"""Number of keys that are sorted at once, which takes half a GB."""

ENTRIES_AT_ONCE = 1 << 22
SPREAD = 0x9E3779B1
"""Multiplier that puts neighboring components, which cost about the same, into different parts."""

BUCKET_ENTRY = np.dtype([("bucket", "<i8"), ("document", "<i8")])
"""A document in a bucket that also holds others."""

BucketEntries = NDArray[np.void]


def find_shared_buckets(sketches: Sketches, band: int, keys_at_once: int = KEYS_AT_ONCE) -> Iterator[BucketEntries]:
    """Yield the entries of a band, sorted by bucket and document. The first bucket is 0."""
    num_ranges = sketches.num_documents // keys_at_once + 1
    num_buckets = 0
    for number in range(num_ranges):
        lowest, highest = (number << 64) // num_ranges, ((number + 1 << 64) // num_ranges) - 1
        keys, documents = _keys_between(sketches, band, lowest, highest)
        entries = _entries(keys, documents)
        entries["bucket"] += num_buckets
        num_buckets = int(entries["bucket"][-1]) + 1 if len(entries) else num_buckets
        yield entries


def _keys_between(sketches: Sketches, band: int, lowest: int, highest: int) -> tuple[Hashes, Positions]:
    keys, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for shard, first in zip(sketches.shards, sketches.first_documents, strict=False):
        own_keys, own_documents = shard.keys_between(band, lowest, highest)
        keys.append(own_keys)
        documents.append(own_documents + first)
    return np.concatenate(keys), np.concatenate(documents)


def _entries(keys: Hashes, documents: Positions) -> BucketEntries:
    # A stable sort keeps documents with the same key in the order of the shards.
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    same_as_previous = np.zeros(len(keys) + 1, bool)
    same_as_previous[1:-1] = keys[1:] == keys[:-1]
    is_shared = same_as_previous[1:] | same_as_previous[:-1]
    entries = np.empty(int(np.count_nonzero(is_shared)), BUCKET_ENTRY)
    entries["document"] = documents[order[is_shared]]
    entries["bucket"] = np.cumsum(~same_as_previous[:-1][is_shared]) - 1
    return entries


class Components:
    """Connected components: documents that share a bucket, directly or through others.

    Documents of different components are never compared. A component has the number of its first
    document.
    """

    def __init__(self, num_documents: int) -> None:
        self._first = np.arange(num_documents)

    def unite(self, entries: BucketEntries) -> None:
        """Make one component of all documents that share a bucket."""
        same = entries["bucket"][1:] == entries["bucket"][:-1]
        ones, others = entries["document"][:-1][same], entries["document"][1:][same]
        while len(ones):
            first, second = self.of(ones), self.of(others)
            differ = first != second
            ones, others = ones[differ], others[differ]
            lower = np.minimum(first, second)[differ]
            np.minimum.at(self._first, np.maximum(first, second)[differ], lower)

    def of(self, documents: Positions) -> Positions:
        """Return the component of each document."""
        found = self._first[documents]
        while True:
            following = self._first[found]
            if np.array_equal(following, found):
                self._first[documents] = found
                return found
            found = following


def write_parts(bands: Sequence[BucketEntries], components: Components, target: Path, num_parts: int) -> None:
    """Divide bucket entries into files, so that each component is in one file only.

    Args:
        bands: the entries of each band.
        components: the components of all documents.
        target: a directory that gets the files 00000.bin and so on. In them the buckets are
            numbered through all bands.
        num_parts: the number of files.
    """
    files = [target / f"{part:05d}.bin" for part in range(num_parts)]
    for file in files:
        file.touch()
    num_buckets = 0
    for band in bands:
        for begin in range(0, len(band), ENTRIES_AT_ONCE):
            entries = np.array(band[begin : begin + ENTRIES_AT_ONCE])
            entries["bucket"] += num_buckets
            parts = components.of(entries["document"]) * SPREAD % 2**32 % num_parts
            for part in np.unique(parts):
                with files[part].open("ab") as file:
                    entries[parts == part].tofile(file)
        num_buckets += int(band["bucket"][-1]) + 1 if len(band) else 0
