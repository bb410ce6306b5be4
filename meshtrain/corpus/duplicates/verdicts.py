"""Verdicts: which documents go, and because of which one that stays.

The documents are taken in order. One goes if it is similar to an earlier one that stays; otherwise it stays. So no
document goes without a similar one that is left, even where A is similar to B and B to C, but C not to A; and of
documents that are all similar to each other the first stays. Candidates are those that meet in a bucket; of these, only
those that stay are ever compared, so that thousands of copies cost one comparison each, and not one for each two.
"""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from meshtrain.corpus.duplicates.buckets import Meetings
from meshtrain.corpus.duplicates.shingles import Positions, jaccard
from meshtrain.corpus.duplicates.sketches import Sketches

VERDICT = np.dtype([("document", "<i8"), ("kept", "<i8"), ("similarity", "<f8")])
"""A document that goes, the one that stays for it, and their Jaccard similarity."""

Verdicts = NDArray[np.void]


class Judge:
    """Compares the documents of some components.

    Args:
        sketches: of all documents.
        similarity: from which on a document goes.
        least_agreement: how many MinHashes two documents share, or they are not worth comparing.
    """

    def __init__(self, sketches: Sketches, similarity: float, least_agreement: int) -> None:
        self._sketches = sketches
        self._similarity = similarity
        self._least_agreement = least_agreement
        self.num_comparisons = 0
        """How many similarities have been computed so far."""

    def judge(self, meetings: Meetings) -> Verdicts:
        """Return the verdicts on all documents that meet others, by document.

        Args:
            meetings: of whole components, in any order.
        """
        by_document = meetings[np.lexsort((meetings["bucket"], meetings["document"]))]
        return np.array(list(self._verdicts(by_document)), VERDICT)

    def _verdicts(self, meetings: Meetings) -> Iterator[tuple[int, int, float]]:
        documents, starts = np.unique(meetings["document"], return_index=True)
        if not len(documents):
            return
        sizes, agreement = self._sketches.num_shingles(documents), self._sketches.agreement(documents)
        ends = [*starts[1:].tolist(), len(meetings)]
        buckets = meetings["bucket"].tolist()
        kept: defaultdict[int, list[int]] = defaultdict(list)
        for place, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
            own_buckets = buckets[start:end]
            met = {other for bucket in own_buckets if bucket in kept for other in kept[bucket]}
            candidates = self._candidates(place, np.array(sorted(met), np.int64), sizes, agreement)
            for other in candidates:
                exact = self._compare(int(documents[other]), int(documents[place]))
                if exact >= self._similarity:
                    yield int(documents[place]), int(documents[other]), exact
                    break
            else:
                for bucket in own_buckets:
                    kept[bucket].append(place)

    def _candidates(self, place: int, met: Positions, sizes: Positions, agreement: NDArray[np.uint8]) -> list[int]:
        """Return those that may be similar, the most promising first."""
        if not len(met):
            return []
        smaller, larger = np.minimum(sizes[met], sizes[place]), np.maximum(sizes[met], sizes[place])
        # The similarity of two sets is at most the ratio of their sizes. Both are divided: both are rounded alike.
        met = met[smaller / larger >= self._similarity]
        num_agreeing = np.count_nonzero(agreement[met] == agreement[place], axis=1)
        promising = num_agreeing >= self._least_agreement
        order = np.argsort(-num_agreeing[promising], kind="stable")
        return met[promising][order].tolist()

    def _compare(self, first: int, second: int) -> float:
        self.num_comparisons += 1
        return jaccard(self._sketches.shingles(first), self._sketches.shingles(second))
