"""The documents of a microbatch, and the segments of them that attention computes one by one."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

Piece = tuple[int, int]
"""The first column of some queries, and the one behind the last."""


class Document(NamedTuple):
    """A document in a row.

    Attributes:
        begin: its first column.
        end: the column behind its last one.
        position: of its first token.
    """

    begin: int
    end: int
    position: int


class Segment(NamedTuple):
    """Some queries of a document, and the keys that they may see. The last keys are their own.

    Attributes:
        row: of the microbatch.
        query: the first query, counted in the queries that this process computes in a row.
        num_queries: number of queries.
        key: the column of the first key.
        num_keys: number of keys.
        position: of the first key in its document.
    """

    row: int
    query: int
    num_queries: int
    key: int
    num_keys: int
    position: int

    @property
    def first(self) -> int:
        """The position of the first query."""
        return self.position + self.num_keys - self.num_queries

    @property
    def end(self) -> int:
        """The position behind the last query."""
        return self.position + self.num_keys

    def part(self, first: int, end: int, position: int) -> "Segment":
        """Return the queries at positions from `first` to `end`, with keys from `position`."""
        key = self.key + position - self.position
        return Segment(self.row, self.query + first - self.first, end - first, key, end - position, position)


def find_documents(positions: Tensor) -> list[list[Document]]:
    """Return the documents of each row, in order.

    Args:
        positions: (batch, seq). A document begins where they do not go on by one.
    """
    begins = positions.diff(prepend=positions.new_full((len(positions), 1), -1)) != 1
    length = positions.shape[1]
    # A simulation has no values, and every condition on them is false there.
    if not begins.any().item():
        return [[Document(0, length, 0)] for _ in range(len(positions))]
    begins[:, 0] = True
    firsts: list[list[int]] = [[] for _ in range(len(positions))]
    for row, column in begins.nonzero().tolist():
        firsts[row].append(column)
    values = iter(positions[begins].tolist())
    return [
        [Document(begin, end, next(values)) for begin, end in zip(row, [*row[1:], length], strict=True)]
        for row in firsts
    ]


def find_segments(documents: Sequence[Sequence[Document]], pieces: Sequence[Piece]) -> list[Segment]:
    """Return the segments of all queries of a process, in the order of its queries.

    Args:
        documents: of each row.
        pieces: the columns of its queries in every row, in order.
    """
    return [segment for row, inside in enumerate(documents) for segment in _segments_of(row, inside, pieces)]


def _segments_of(row: int, documents: Sequence[Document], pieces: Sequence[Piece]) -> Iterator[Segment]:
    query = 0
    for begin, end in pieces:
        for document in documents:
            first, last = max(begin, document.begin), min(end, document.end)
            if first < last:
                num_keys = last - document.begin
                yield Segment(row, query, last - first, document.begin, num_keys, document.position)
                query += last - first


def in_chunks(segments: Iterable[Segment], size: int) -> list[Segment]:
    """Return segments that lie in chunks of `size` positions, with the keys of their chunk."""
    return [
        it.part(max(it.first, chunk), min(it.end, chunk + size), max(it.position, chunk))
        for it in segments
        for chunk in range(it.first // size * size, it.end, size)
    ]


def in_windows(segments: Iterable[Segment], size: int) -> list[Segment]:
    """Return segments of at most `size` queries, with the keys of windows of `size` keys."""
    return [
        it.part(first, min(it.end, first + size), max(it.position, first - size + 1))
        for it in segments
        for first in range(it.first, it.end, size)
    ]
