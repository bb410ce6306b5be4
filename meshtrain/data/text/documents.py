"""Documents: the texts inside source files, streamed piece by piece, so that memory does not grow with the corpus."""

from collections.abc import Iterator
from typing import NamedTuple

from meshtrain import console
from meshtrain.data.text.chunks import read_chunks
from meshtrain.data.text.corpus import START, Corpus
from meshtrain.data.text.records import BadRecord, Text, parse
from meshtrain.data.tokens.cutting import Cutter, TooLongError
from meshtrain.data.tokens.options import with_names_shown

MAX_SHOWN_PROBLEMS = 3
"""Records that are left out are shown, until there were so many; all are counted."""


class Piece(NamedTuple):
    """A document, or a part of one that is too long to be tokenized at once."""

    text: str
    num_bytes: int
    ends_document: bool
    is_held_out: bool


class DocumentReader:
    """One pass over the documents of a corpus, in this process and without a tokenizer.

    Iterating yields pieces. `disk_bytes` is how much of the files was read so far, and `skipped_records` how many
    records
    were broken, so far. A document without any text yields nothing but is counted in `empty_documents`.

    Args:
        shows_problems: show which records are left out; not for who reads a corpus that is read again.
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
            DataError: a file that cannot be read; a broken record, unless those are skipped.
        """
        cutter = Cutter()
        for chunk in read_chunks(self._corpus, cutter, START):
            self.disk_bytes += chunk.disk_bytes
            for record in parse(chunk, self._corpus.text_key):
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
            self._count(BadRecord(f"{record.place}: {error}", is_damage=False))
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
    """Do what a corpus says about records that are none, for one that is to be counted: the first are shown.

    Args:
        num_before: how many were counted before.
        shows_problems: show it.

    Raises:
        DataError: if it says to fail.
    """
    if corpus.on_bad_record == "fail":
        raise corpus.refusal(problem.message)
    if not shows_problems:
        return
    if problem.is_damage:
        console.warning(f"{with_names_shown(problem.message)}; what follows is left out")
    elif num_before < MAX_SHOWN_PROBLEMS:
        is_last = num_before == MAX_SHOWN_PROBLEMS - 1
        console.warning(f"{with_names_shown(problem.message)}; left out{'; more are only counted' * is_last}")
