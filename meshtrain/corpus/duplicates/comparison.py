"""Comparison: decides which documents are removed, and which kept document each one duplicates.

The documents are visited in order. A document is removed if it is similar to an earlier kept one,
and kept otherwise. So every removed document has a similar one that is kept, even where A is
similar to B, and B to C, but not C to A. Of documents that are all similar to each other, the first
is kept.

The candidates for a document are the kept documents that share a bucket with it. Thousands of
copies therefore cost one comparison each, where comparing all pairs would cost millions.
"""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from meshtrain.corpus.duplicates.buckets import BucketEntries
from meshtrain.corpus.duplicates.shingles import Positions, jaccard
from meshtrain.corpus.duplicates.sketches import Sketches

DUPLICATE = np.dtype([("document", "<i8"), ("kept", "<i8"), ("similarity", "<f8")])
"""A removed document, the kept one that it duplicates, and their Jaccard similarity."""

Duplicates = NDArray[np.void]


class DuplicateFinder:
    """Compares documents that share buckets.

    Args:
        sketches: the sketches of all documents.
        similarity: the least Jaccard similarity of a duplicate.
        least_agreement: documents that share fewer MinHashes than this number are not compared.
    """

    def __init__(self, sketches: Sketches, similarity: float, least_agreement: int) -> None:
        self._sketches = sketches
        self._similarity = similarity
        self._least_agreement = least_agreement
        self.num_comparisons = 0
        """Number of similarities that have been computed so far."""

    def find(self, entries: BucketEntries) -> Duplicates:
        """Return the duplicates among the documents of some components, sorted by document.

        Args:
            entries: the bucket entries of complete components, in any order.
        """
        by_document = entries[np.lexsort((entries["bucket"], entries["document"]))]
        return np.array(list(self._duplicates(by_document)), DUPLICATE)

    def _duplicates(self, entries: BucketEntries) -> Iterator[tuple[int, int, float]]:
        documents, starts = np.unique(entries["document"], return_index=True)
        if not len(documents):
            return
        sizes, agreement = self._sketches.num_shingles(documents), self._sketches.agreement(documents)
        ends = [*starts[1:].tolist(), len(entries)]
        buckets = entries["bucket"].tolist()
        kept: defaultdict[int, list[int]] = defaultdict(list)
        for position, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
            own_buckets = buckets[start:end]
            sharing = {other for bucket in own_buckets if bucket in kept for other in kept[bucket]}
            candidates = self._candidates(position, np.array(sorted(sharing), np.int64), sizes, agreement)
            for other in candidates:
                exact = self._compare(int(documents[other]), int(documents[position]))
                if exact >= self._similarity:
                    yield int(documents[position]), int(documents[other]), exact
                    break
            else:
                for bucket in own_buckets:
                    kept[bucket].append(position)

    def _candidates(
        self, position: int, sharing: Positions, sizes: Positions, agreement: NDArray[np.uint8]
    ) -> list[int]:
        """Return the documents that may be similar, those with the most common MinHashes first."""
        if not len(sharing):
            return []
        smaller, larger = np.minimum(sizes[sharing], sizes[position]), np.maximum(sizes[sharing], sizes[position])
        # The similarity of two sets is at most the ratio of their sizes. Both the ratio and the
        # similarity are quotients, so they are rounded alike and can be compared.
        sharing = sharing[smaller / larger >= self._similarity]
        num_agreeing = np.count_nonzero(agreement[sharing] == agreement[position], axis=1)
        promising = num_agreeing >= self._least_agreement
        order = np.argsort(-num_agreeing[promising], kind="stable")
        return sharing[promising][order].tolist()

    def _compare(self, first: int, second: int) -> float:
        self.num_comparisons += 1
        return jaccard(self._sketches.shingles(first), self._sketches.shingles(second))
