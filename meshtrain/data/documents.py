"""Documents: the texts inside source files, streamed piece by piece, so that memory does not grow with the corpus."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal, NamedTuple, TextIO

from xxhash import xxh3_64_intdigest

from meshtrain.data.cache import identity_of
from meshtrain.data.sources import SourceFile
from meshtrain.errors import DataError, name_some

PIECE_CHARACTERS = 1 << 20
"""Longer documents are tokenised in pieces of about this length that end with a line."""

READING_VERSION = 1
"""Counts the ways in which the same files have been cut into documents and pieces."""

OTHER_TYPES = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


class Piece(NamedTuple):
    """A document, or a part of one that is too long to be tokenised at once."""

    text: str
    num_bytes: int
    ends_document: bool
    is_held_out: bool


@dataclass(frozen=True)
class Corpus:
    """Source files and how their documents are read."""

    files: tuple[SourceFile, ...]
    content_hashes: tuple[str, ...]
    text_key: str = "text"
    on_bad_record: Literal["fail", "skip"] = "fail"
    held_out: float = 0.0
    """The fraction of the documents that is kept aside for validation."""

    @property
    def num_bytes(self) -> int:
        """The size of the files on disk."""
        return sum(file.num_bytes for file in self.files)

    @property
    def identity(self) -> str:
        """A hash of all that decides which documents are read; no path is part of it."""
        contents = [(file.kind, content) for file, content in zip(self.files, self.content_hashes, strict=True)]
        reading = (READING_VERSION, PIECE_CHARACTERS, self.text_key, self.on_bad_record, self.held_out)
        return identity_of(contents, reading)

    def is_held_out(self, document: int) -> bool:
        """Return whether a document is kept aside for validation.

        It depends on the document's place alone: the validation text stays the same for every seed and mesh, and for
        more documents after these. The first document always is held out, so that there is one.
        """
        if document == 0:
            return self.held_out > 0
        return xxh3_64_intdigest(document.to_bytes(8, "little")) < self.held_out * 2**64

    def check_unchanged(self) -> None:
        """Check that no file was written to since its content was hashed.

        Raises:
            DataError: naming the first file that was.
        """
        for file in self.files:
            if not file.is_unchanged():
                raise DataError(
                    f"{file.path} changed while it was read; start again when nothing writes to it any more"
                )


class DocumentReader:
    """One pass over the documents of a corpus.

    Iterating yields pieces; `disk_bytes` tells how much of the files was read and `skipped_records` how many records
    were broken, so far. A document without any text yields nothing but is counted in `empty_documents`.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.disk_bytes = 0
        self.skipped_records = 0
        self.empty_documents = 0
        self._corpus = corpus
        self._num_documents = 0

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces of all documents, in the order of the files.

        Raises:
            DataError: a file that cannot be read; a broken record, unless those are skipped.
        """
        for file in self._corpus.files:
            before = self.disk_bytes
            with _opened(file) as raw:
                if file.kind in ("txt", "python"):
                    yield from self._text_file(raw, file)
                else:
                    for piece in self._json_lines(raw, file):
                        self.disk_bytes = before + raw.tell()
                        yield piece
            self.disk_bytes = before + file.num_bytes

    def _text_file(self, raw: BinaryIO, file: SourceFile) -> Iterator[Piece]:
        with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as stream:
            try:
                while stream.read(PIECE_CHARACTERS):
                    pass
            except UnicodeDecodeError as error:
                if file.kind == "txt":
                    self._bad_record(f"{file.path}", f"not UTF-8 text ({error.reason})")
                return
            stream.seek(0)
            yield from self._document(stream)

    def _json_lines(self, raw: BinaryIO, file: SourceFile) -> Iterator[Piece]:
        lines = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if file.kind == "jsonl.gz" else raw
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                text = _text_of(line, self._corpus.text_key)
            except (ValueError, RecursionError) as error:
                self._bad_record(f"{file.path}, line {number}", str(error))
            else:
                yield from self._document(io.StringIO(text, newline=""))

    def _document(self, stream: TextIO) -> Iterator[Piece]:
        text = _next_piece(stream)
        if not text:
            self.empty_documents += 1
            return
        is_held_out = self._corpus.is_held_out(self._num_documents)
        self._num_documents += 1
        while text:
            following = _next_piece(stream)
            num_bytes = len(text) if text.isascii() else len(text.encode())
            yield Piece(text, num_bytes, ends_document=not following, is_held_out=is_held_out)
            text = following

    def _bad_record(self, where: str, reason: str) -> None:
        if self._corpus.on_bad_record == "fail":
            raise DataError(f'{where}: {reason}; mend it, or leave such records out with data.on_bad_record = "skip"')
        self.skipped_records += 1


@contextmanager
def _opened(file: SourceFile) -> Iterator[BinaryIO]:
    try:
        with file.path.open("rb") as raw:
            yield raw
    except (EOFError, zlib.error) as error:
        raise DataError(f"cannot read {file.path}: {error}; the gzip file is damaged, write it again") from error
    except OSError as error:
        raise DataError(f"cannot read {file.path}: {error.strerror or error}; mend it or leave it out") from error


def _next_piece(stream: TextIO) -> str:
    text = stream.read(PIECE_CHARACTERS)
    return text + stream.readline(PIECE_CHARACTERS) if len(text) == PIECE_CHARACTERS else text


def _text_of(line: bytes, text_key: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (column {error.colno}: {error.msg})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start + 1}: {error.reason})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{_type_name(record)} where an object with the key {json.dumps(text_key)} is expected")
    if text_key not in record:
        raise ValueError(
            f'no key "{text_key}" (data.text_key); the keys are {name_some([json.dumps(key) for key in record])}'
        )
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f'the key "{text_key}" (data.text_key) holds {_type_name(text)} and not text')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f'the text of "{text_key}" holds half a surrogate pair, which stands for no character'
        ) from None
    return text


def _type_name(value: object) -> str:
    return "null" if value is None else "text" if isinstance(value, str) else OTHER_TYPES[type(value)]
