"""Chunks: consecutive parts of source files, read in order from any position.

Reading chunks is cheap, because nothing is parsed.
"""

import codecs
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple

from meshtrain.data.text.byte_streams import DamagedError, open_source_file, seek_forward
from meshtrain.data.text.corpus import Corpus, Position, RecordForm
from meshtrain.data.text.parquet import read_parquet_records, read_rows
from meshtrain.data.tokens.cutting import PIECE_CHARACTERS, Cutter, TooLongError
from meshtrain.errors import DataError, reason_of

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 28

ChunkKind = Literal["lines", "text", "python", "problem", "damage", "end"]


class Chunk(NamedTuple):
    """Consecutive lines of a file, a document, a piece of a long document, or a problem."""

    kind: ChunkKind
    data: bytes
    """The bytes of the file, which should be UTF-8; the message of a problem."""
    location: str
    """The file, and the row of a table; for messages."""
    first_line: int
    """The number of the first line, from 1."""
    ends_document: bool
    end: Position
    disk_bytes: int
    """The bytes on disk that were read for it."""


def read_chunks(corpus: Corpus, cutter: Cutter, start: Position) -> Iterator[Chunk]:
    """Yield the chunks of a corpus from `start` on.

    What cannot be read becomes a chunk of its own at the same position. A "problem" is one bad
    record. A "damage" means that the rest of the file is lost. Each file ends with a chunk without
    data.

    Raises:
        DataError: if a file cannot be opened, or a package that is needed to read it is missing.
    """
    for number in range(start.file, len(corpus.files)):
        reader = _FileReader(corpus, cutter, start if number == start.file else Position(number))
        yield from reader.chunks()


class _FileReader:
    """Reads one file from a position on."""

    def __init__(self, corpus: Corpus, cutter: Cutter, start: Position) -> None:
        self._file = corpus.files[start.file]
        self._corpus = corpus
        self._cutter = cutter
        self._position = start

    def chunks(self) -> Iterator[Chunk]:
        try:
            if self._file.kind == "parquet":
                form = self._corpus.form
                yield from self._rows() if form is None else self._records(form)
            else:
                with open_source_file(self._file) as (stream, raw):
                    yield from self._lines(stream, raw) if "json" in self._file.kind else self._text(stream, raw)
        except DamagedError as damage:
            yield self._chunk("damage", f"{self._location()}: {damage}".encode())
        except OSError as error:
            where = self._file.path
            raise DataError(f"cannot read {where}: {reason_of(error)}", "fix it or leave it out") from error
        end = self._chunk("end", b"", disk_bytes=self._file.num_bytes)
        yield end._replace(end=Position(end.end.file + 1))

    def _chunk(
        self,
        kind: ChunkKind,
        data: bytes,
        *,
        location: str = "",
        first_line: int = 0,
        ends_document: bool = True,
        disk_bytes: int | None = None,
    ) -> Chunk:
        read = 0 if disk_bytes is None else disk_bytes - self._position.disk_bytes
        self._position = self._position._replace(disk_bytes=self._position.disk_bytes + read)
        return Chunk(kind, data, location or str(self._file.path), first_line, ends_document, self._position, read)

    def _location(self) -> str:
        record = self._position.record
        what = "row" if self._file.kind == "parquet" else "line"
        return f"{self._file.path}, after {what} {record:,}" if record else str(self._file.path)

    def _move(self, num_bytes: int, records: int) -> None:
        before = self._position
        self._position = before._replace(offset=before.offset + num_bytes, record=before.record + records)

    def _lines(self, stream: BinaryIO, raw: BinaryIO) -> Iterator[Chunk]:
        seek_forward(stream, self._position.offset)
        for data, num_bytes, num_lines in _complete_lines(stream):
            first_line = self._position.record + 1
            self._move(num_bytes, num_lines)
            if data is None:
                problem = f"{self._file.path}, line {first_line}: longer than {MAX_LINE_BYTES:,} bytes"
                yield self._chunk("problem", problem.encode(), disk_bytes=raw.tell())
            else:
                yield self._chunk("lines", data, first_line=first_line, disk_bytes=raw.tell())

    def _text(self, stream: BinaryIO, raw: BinaryIO) -> Iterator[Chunk]:
        kind: ChunkKind = "python" if self._file.kind == "python" else "text"
        if self._position.offset == 0:
            data = stream.read(PIECE_CHARACTERS)
            if len(data) < PIECE_CHARACTERS:
                self._move(len(data), 0)
                yield self._chunk(kind, data.removeprefix(codecs.BOM_UTF8))
                return
            if problem := _not_utf8(data, stream):
                if kind == "text":
                    yield self._chunk("problem", f"{self._file.path}: {problem}".encode())
                return
        with open_source_file(self._file) as (again, raw_again):
            yield from self._pieces(again, raw_again)

    def _pieces(self, stream: BinaryIO, raw: BinaryIO) -> Iterator[Chunk]:
        """Yield the pieces of a file that is one long document and valid UTF-8."""
        seek_forward(stream, self._position.offset)
        decoder = codecs.getincrementaldecoder("utf-8")()
        text, is_all = "", False
        while text or not is_all:
            try:
                length = self._cutter.cut(text, is_all=is_all)
            except TooLongError as error:
                message = f"{self._file.path}, from byte {self._position.offset + 1:,} on: {error}"
                yield self._chunk("damage", message.encode())
                yield self._chunk("text", b"")
                return
            if length == 0:
                data = stream.read(PIECE_CHARACTERS)
                is_all = not data
                text += decoder.decode(data, is_all)
                continue
            data, text = text[:length].encode(), text[length:]
            shown = data if self._position.offset else data.removeprefix(codecs.BOM_UTF8)
            self._move(len(data), 0)
            yield self._chunk("text", shown, ends_document=is_all and not text, disk_bytes=raw.tell())

    def _records(self, form: RecordForm) -> Iterator[Chunk]:
        for lines, fraction in read_parquet_records(self._file, form.keys, self._position.record):
            read = self._position.disk_bytes + int(fraction * self._file.num_bytes)
            for line in lines:
                self._move(0, 1)
                location = f"{self._file.path}, row {self._position.record}"
                if isinstance(line, str):
                    yield self._chunk("problem", f"{location}: {line}".encode(), disk_bytes=read)
                else:
                    yield self._chunk("lines", line, location=location, disk_bytes=read)

    def _rows(self) -> Iterator[Chunk]:
        text_key, setting = self._corpus.text_key, self._corpus.settings.text_key
        for texts, fraction in read_rows(self._file, text_key, self._position.record, setting=setting):
            read = self._position.disk_bytes + int(fraction * self._file.num_bytes)
            for text in texts:
                self._move(0, 1)
                location = f"{self._file.path}, row {self._position.record}"
                if text is None:
                    problem = f'{location}: the column "{text_key}" ({setting}) holds null and not text'
                    yield self._chunk("problem", problem.encode(), disk_bytes=read)
                else:
                    yield self._chunk("text", text, location=location, disk_bytes=read)


def _complete_lines(stream: BinaryIO) -> Iterator[tuple[bytes | None, int, int]]:
    """Yield (lines, number of bytes, number of lines), each of about CHUNK_BYTES.

    A chunk ends where a line ends. The data are None for a line that is too long to be held in
    memory.

    Raises:
        DamagedError: after the last complete line.
    """
    rest = bytearray()
    while True:
        try:
            part = stream.read1(CHUNK_BYTES)  # type: ignore[attr-defined]
        except DamagedError:
            yield from _take_lines(rest)
            raise
        if not part:
            break
        rest += part
        if len(rest) >= CHUNK_BYTES and b"\n" in part:
            yield from _take_lines(rest)
        elif len(rest) > MAX_LINE_BYTES + CHUNK_BYTES:
            yield from _take_lines(rest)
            yield None, len(rest) + _drop_line(stream), 1
            rest.clear()
    if rest:
        yield bytes(rest), len(rest), rest.count(b"\n") + (not rest.endswith(b"\n"))


def _drop_line(stream: BinaryIO) -> int:
    """Read to the end of a line without keeping it. Return its number of bytes."""
    dropped = 0
    while part := stream.readline(CHUNK_BYTES):
        dropped += len(part)
        if part.endswith(b"\n"):
            break
    return dropped


def _take_lines(rest: bytearray) -> Iterator[tuple[bytes, int, int]]:
    """Remove the complete lines from the front of `rest`, and yield them if there are any."""
    if border := rest.rfind(b"\n") + 1:
        data = bytes(rest[:border])
        del rest[:border]
        yield data, border, data.count(b"\n")


def _not_utf8(data: bytes, stream: BinaryIO) -> str | None:
    """Return why `data` and the rest of `stream` are not UTF-8; None if they are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = 0
    while True:
        kept_back = len(decoder.getstate()[0])
        try:
            decoder.decode(data, not data)
        except UnicodeDecodeError as error:
            return not_utf8(error, before - kept_back)
        if not data:
            return None
        before += len(data)
        data = stream.read(PIECE_CHARACTERS)


def not_utf8(error: UnicodeDecodeError, before: int = 0) -> str:
    """Return the message for bytes that are not UTF-8; it names the first wrong byte."""
    return f"not UTF-8 text (byte {before + error.start + 1:,}: {error.reason})"
