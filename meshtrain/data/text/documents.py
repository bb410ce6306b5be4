"""Documents: the texts inside source files.

They are read piece by piece, so that memory does not grow with the corpus.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshtrain import console
from meshtrain.data.text.chunks import read_chunks
from meshtrain.data.text.corpus import START, Corpus
from meshtrain.data.text.records import BadRecord, Text, parse
from meshtrain.data.tokens.cutting import Cutter, TooLongError

MAX_SHOWN_PROBLEMS = 3
"""The number of skipped records that are shown; all are counted."""


class Piece(NamedTuple):
    """A document, or a part of one that is too long to be encoded at once."""

    text: str
    num_bytes: int
    ends_document: bool
    is_held_out: bool


class DocumentReader:
    """One pass over the documents of a corpus, in this process and without a tokenizer.

    Iterating yields pieces. `disk_bytes` is the number of bytes of the files that were read so far,
    and `skipped_records` the number of bad records. A document without any text yields nothing, but
    is counted in `empty_documents`.

    Args:
        shows_problems: print the skipped records; False for a corpus that is read again later.
    """

    def __init__(self, corpus: Corpus, *, shows_problems: bool = True) -> None:
        self.disk_bytes = 0
        self.skipped_records = 0
        self.empty_documents = 0
        self._corpus = corpus
        self._shows_problems = shows_problems
        self._num_documents = 0
        self._is_open = False

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces of all documents, in the order of the files.

        Raises:
            DataError: if a file cannot be read, or a record is bad and bad records are not skipped.
        """
        cutter = Cutter()
        for chunk in read_chunks(self._corpus, cutter, START):
            self.disk_bytes += chunk.disk_bytes
            for record in parse(chunk, self._corpus.text_key, setting=self._corpus.settings.text_key):
                if self._num_documents == self._corpus.num_documents:
                    return
                if isinstance(record, BadRecord):
                    self._count(record)
                else:
                    yield from self._pieces(record, cutter)

    def _pieces(self, record: Text, cutter: Cutter) -> Iterator[Piece]:
        try:
            pieces = list(cutter.pieces(record.text))
        except TooLongError as error:
            self._count(BadRecord(f"{record.location}: {error}", is_damage=False))
            return
        if not pieces and not self._is_open:
            self.empty_documents += 1
            return
        is_held_out = self._corpus.is_held_out(self._num_documents)
        for number, piece in enumerate(pieces, 1):
            num_bytes = len(piece) if piece.isascii() else len(piece.encode())
            yield Piece(piece, num_bytes, record.ends_document and number == len(pieces), is_held_out)
        self._is_open = not record.ends_document
        self._num_documents += record.ends_document

    def _count(self, problem: BadRecord) -> None:
        count_problem(problem, self._corpus, self.skipped_records, shows_problems=self._shows_problems)
        self.skipped_records += 1


def count_problem(problem: BadRecord, corpus: Corpus, num_before: int, *, shows_problems: bool = True) -> None:
    """Refuse a bad record or print that it is skipped, as the corpus asks.

    Args:
        num_before: the number of bad records before this one.
        shows_problems: print it, if it is one of the first.

    Raises:
        DataError: if bad records are not skipped.
    """
    if corpus.on_bad_record == "fail":
        raise corpus.refusal(problem.message)
    if not shows_problems:
        return
    if problem.is_damage:
        console.warning(f"{problem.message}; what follows is left out")
    elif num_before < MAX_SHOWN_PROBLEMS:
        is_last = num_before == MAX_SHOWN_PROBLEMS - 1
        console.warning(f"{problem.message}; left out{'; more are only counted' * is_last}")
