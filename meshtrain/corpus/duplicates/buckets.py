"""Buckets: which documents meet in a band, and which could have to do with each other at all."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshtrain.corpus.duplicates.shingles import Hashes, Positions
from meshtrain.corpus.duplicates.sketches import Sketches

KEYS_AT_ONCE = 1 << 23
"""How many keys are sorted at once: half a GB."""

MEETINGS_AT_ONCE = 1 << 22
SPREAD = 0x9E3779B1
"""Neighbours, which cost alike, go to different parts."""

MEETING = np.dtype([("bucket", "<i8"), ("document", "<i8")])
"""A document in a bucket that holds others, too."""

Meetings = NDArray[np.void]


def find_meetings(sketches: Sketches, band: int, keys_at_once: int = KEYS_AT_ONCE) -> Iterator[Meetings]:
    """Yield the meetings of a band by bucket, counted from zero; the documents ascend within each bucket."""
    num_ranges = sketches.num_documents // keys_at_once + 1
    num_buckets = 0
    for number in range(num_ranges):
        lowest, highest = (number << 64) // num_ranges, ((number + 1 << 64) // num_ranges) - 1
        keys, documents = _keys_between(sketches, band, lowest, highest)
        meetings = _meetings(keys, documents)
        meetings["bucket"] += num_buckets
        num_buckets = int(meetings["bucket"][-1]) + 1 if len(meetings) else num_buckets
        yield meetings


def _keys_between(sketches: Sketches, band: int, lowest: int, highest: int) -> tuple[Hashes, Positions]:
    keys, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for shard, first in zip(sketches.shards, sketches.first_documents, strict=False):
        own_keys, own_documents = shard.keys_between(band, lowest, highest)
        keys.append(own_keys)
        documents.append(own_documents + first)
    return np.concatenate(keys), np.concatenate(documents)


def _meetings(keys: Hashes, documents: Positions) -> Meetings:
    # Stable: of documents with one key, the first shard's come first.
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    as_before = np.zeros(len(keys) + 1, bool)
    as_before[1:-1] = keys[1:] == keys[:-1]
    meets = as_before[1:] | as_before[:-1]
    meetings = np.empty(int(np.count_nonzero(meets)), MEETING)
    meetings["document"] = documents[order[meets]]
    meetings["bucket"] = np.cumsum(~as_before[:-1][meets]) - 1
    return meetings


class Components:
    """Documents that could have to do with each other: those that meet, those that meet those, and so on.

    A component is named by its first document.
    """

    def __init__(self, num_documents: int) -> None:
        self._first = np.arange(num_documents)

    def unite(self, meetings: Meetings) -> None:
        """Make one component of all that meet in a bucket."""
        same = meetings["bucket"][1:] == meetings["bucket"][:-1]
        ones, others = meetings["document"][:-1][same], meetings["document"][1:][same]
        while len(ones):
            first, second = self.of(ones), self.of(others)
            differ = first != second
            ones, others = ones[differ], others[differ]
            lower = np.minimum(first, second)[differ]
            np.minimum.at(self._first, np.maximum(first, second)[differ], lower)

    def of(self, documents: Positions) -> Positions:
        """Return the components of documents."""
        found = self._first[documents]
        while True:
            following = self._first[found]
            if np.array_equal(following, found):
                self._first[documents] = found
                return found
            found = following


def write_parts(meetings: Sequence[Meetings], components: Components, target: Path, num_parts: int) -> None:
    """Sort meetings into files, so that no component is in two of them.

    Args:
        meetings: of each band.
        components: of all the documents.
        target: a directory; it gets the files 00000.bin and so on, with the buckets counted through all bands.
        num_parts: how many files.
    """
    files = [target / f"{part:05d}.bin" for part in range(num_parts)]
    for file in files:
        file.touch()
    num_buckets = 0
    for band in meetings:
        for begin in range(0, len(band), MEETINGS_AT_ONCE):
            some = np.array(band[begin : begin + MEETINGS_AT_ONCE])
            some["bucket"] += num_buckets
            parts = components.of(some["document"]) * SPREAD % 2**32 % num_parts
            for part in np.unique(parts):
                with files[part].open("ab") as file:
                    some[parts == part].tofile(file)
        num_buckets += int(band["bucket"][-1]) + 1 if len(band) else 0
