"""Rows of a stream: text that is read and tokenized during training, from any position on.

A position is a `Cursor`: a few numbers. The rows after it are the same as if everything before it
had been read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from upath import UPath

from meshtrain import console
from meshtrain.data.samples.order import derive_round_keys, permute
from meshtrain.data.text.chunks import read_chunks
from meshtrain.data.text.corpus import START, Corpus, Position
from meshtrain.data.text.documents import count_problem
from meshtrain.data.tokens.cutting import Cutter
from meshtrain.data.tokens.encoding import EncodedBlock, Task
from meshtrain.data.tokens.workers import TextBlock, encode_blocks, group_into_blocks
from meshtrain.errors import DataError, UserError, name_some

ENCODERS = 1
"""The number of processes that tokenize for this one. Each data-parallel rank has its own."""


class Cursor(NamedTuple):
    """A position in a stream, between two tokens.

    Attributes:
        epoch: number of finished passes over the files.
        position: position in the files of this pass, before the current block.
        texts: number of finished texts of that block.
        tokens: number of finished tokens of the next text.
        is_open: whether the next text continues a document.
    """

    epoch: int = 0
    position: Position = START
    texts: int = 0
    tokens: int = 0
    is_open: bool = False

    def flat(self) -> tuple[int, ...]:
        """Return the cursor as integers, for a checkpoint."""
        return (self.epoch, *self.position, self.texts, self.tokens, int(self.is_open))

    @classmethod
    def from_flat(cls, numbers: tuple[int, ...]) -> "Cursor":
        """Return the cursor of these integers; see `flat`."""
        epoch, *position, texts, tokens, is_open = numbers
        return cls(epoch, Position(*position), texts, tokens, bool(is_open))


class Row(NamedTuple):
    """A sample of a stream, and the cursor of its start.

    Attributes:
        tokens: (tokens,) int64; a packed row has one more than the sequence length.
        trained: (tokens,) bool: whether to train on predicting the token.
        begins: (tokens,) bool: whether a document begins there.
    """

    cursor: Cursor
    tokens: np.ndarray
    trained: np.ndarray
    begins: np.ndarray


@dataclass(frozen=True)
class StreamReader:
    """Reads the rows of a stream.

    Attributes:
        corpus: the files.
        task: how they are tokenized.
        end_id: the token after every document.
        shuffle: read the files of each pass in a new order.
        seed: decides that order.
    """

    corpus: Corpus
    task: Task
    end_id: int
    shuffle: bool
    seed: str

    def packed_rows(self, start: Cursor, sequence_length: int) -> Iterator[Row]:
        """Yield full sequences without end, each with the first token of the next.

        Raises:
            DataError: if a file cannot be read, or a record is bad.
        """
        size, pieces = sequence_length + 1, _Pieces()
        for segment in self._segments(start):
            pieces.add(segment)
            while pieces.num_tokens >= size:
                yield pieces.first(size)
                pieces.drop(sequence_length)

    def padded_rows(self, start: Cursor, sequence_length: int) -> Iterator[Row]:
        """Yield rows of one document each without end. Longer documents are cut off.

        Raises:
            DataError: if a file cannot be read, or a record is bad.
        """
        pieces = _Pieces()
        for segment in self._segments(start):
            if segment.begins[0] and pieces.num_tokens:
                yield pieces.first(min(sequence_length, pieces.num_tokens))
                pieces = _Pieces()
            # Text that will be cut off is not kept, because a file may be a single document.
            if pieces.num_tokens < sequence_length:
                pieces.add(segment)

    def _segments(self, start: Cursor) -> Iterator[Row]:
        """Yield the texts from a cursor on, with the end token after each that ends a document."""
        epoch, begin = start.epoch, start
        while True:
            num_tokens = 0
            for segment in self._segments_of_pass(begin):
                num_tokens += len(segment.tokens)
                yield segment
            if not num_tokens and begin == Cursor(epoch):
                raise DataError(f"{self.corpus.files[0].path} and the files after it: no text found to stream")
            epoch += 1
            begin = Cursor(epoch)

    def _segments_of_pass(self, start: Cursor) -> Iterator[Row]:
        corpus = replace(self.corpus, files=self._order_files(start.epoch))
        cutter = Cutter(Tokenizer.from_str(self.task.tokenizer))
        blocks = group_into_blocks(read_chunks(corpus, cutter, start.position))
        begin, is_open, num_done, num_skipped = start.position, start.is_open, start.texts, start.tokens
        num_left_out = 0
        for block, encoded in _report_read_errors(encode_blocks(blocks, self.task, ENCODERS), corpus):
            for _, problem in encoded.problems:
                # Only the first pass shows problems, because every pass has the same ones.
                count_problem(problem, corpus, num_left_out, shows_problems=start.epoch == 0)
                num_left_out += 1
            cursor = Cursor(start.epoch, begin, is_open=is_open)
            for number, segment in enumerate(_split_texts(encoded, cursor, self.end_id)):
                is_open = not encoded.ends_document[number]
                if num_done:
                    num_done -= 1
                elif rest := _drop_tokens(segment, num_skipped):
                    yield rest
                    num_skipped = 0
                else:
                    num_skipped = 0
            begin = block[-1].end
        if num_left_out and start == Cursor():
            files = name_some([str(file.path) for file in self.corpus.files], 1)
            console.warning(f"{files}: {num_left_out:,} bad records were left out of the stream's first pass")

    def _order_files(self, epoch: int) -> tuple:
        files = self.corpus.files
        if not self.shuffle:
            return files
        order = permute(np.arange(len(files)), len(files), keys=derive_round_keys(f"{self.seed}/files/{epoch}"))
        return tuple(files[number] for number in order)


class _Pieces:
    """Consecutive texts, from which rows are cut."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        self._rows.append(row)
        self.num_tokens += len(row.tokens)

    def first(self, size: int) -> Row:
        """Return the first tokens as a row."""
        tokens, trained, begins = np.empty(size, np.int64), np.empty(size, bool), np.empty(size, bool)
        filled = 0
        for row in self._rows:
            taken = min(size - filled, len(row.tokens))
            for target, part in ((tokens, row.tokens), (trained, row.trained), (begins, row.begins)):
                target[filled : filled + taken] = part[:taken]
            filled += taken
            if filled == size:
                break
        return Row(self._rows[0].cursor, tokens, trained, begins)

    def drop(self, size: int) -> None:
        """Remove the first tokens."""
        self.num_tokens -= size
        while self._rows and size >= len(self._rows[0].tokens):
            size -= len(self._rows.pop(0).tokens)
        if size:
            rest = _drop_tokens(self._rows[0], size)
            assert rest is not None
            self._rows[0] = rest


def _split_texts(block: EncodedBlock, cursor: Cursor, end_id: int) -> Iterator[Row]:
    """Yield the texts of a block, including empty ones."""
    ends = np.cumsum(block.lengths)
    is_open = cursor.is_open
    for number, (end, length, ends_document) in enumerate(zip(ends, block.lengths, block.ends_document, strict=True)):
        tokens = block.tokens[end - length : end].astype(np.int64)
        trained = np.ones(length, bool) if block.trained is None else block.trained[end - length : end]
        # A document without a token has no end token.
        if ends_document and (length or is_open):
            trains_end = block.trained is None or bool(length and trained[-1] and tokens[-1] != end_id)
            tokens, trained = np.append(tokens, end_id), np.append(trained, trains_end)
        begins = np.zeros(len(tokens), bool)
        if len(tokens):
            begins[0] = not is_open
        yield Row(cursor._replace(texts=number, is_open=is_open), tokens, trained, begins)
        is_open = not ends_document


def _drop_tokens(row: Row, size: int) -> Row | None:
    """Return a row without its first tokens; None if none are left."""
    if size >= len(row.tokens):
        return None
    cursor = row.cursor._replace(tokens=row.cursor.tokens + size)
    return Row(cursor, row.tokens[size:], row.trained[size:], row.begins[size:])


def _report_read_errors(
    blocks: Iterator[tuple[TextBlock, EncodedBlock]], corpus: Corpus
) -> Iterator[tuple[TextBlock, EncodedBlock]]:
    """Yield the blocks, and raise a DataError if a file cannot be read.

    The libraries that read URLs have exceptions of their own, so for URLs any exception is one.
    """
    expected = (Exception,) if any(isinstance(file.path, UPath) for file in corpus.files) else (OSError,)
    try:
        yield from blocks
    except UserError:
        raise
    except expected as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{corpus.files[0].path} and the files after it cannot be read: {reason}") from error
