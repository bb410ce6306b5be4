"""Records of source files. An unreadable record is returned with its location, never left out."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from datatrove.data import Document
from pyarrow import ArrowException, RecordBatch
from pyarrow.parquet import ParquetFile

from meshtrain.data.text.byte_streams import DamagedError, open_source_file
from meshtrain.data.text.sources import SourceFile
from meshtrain.errors import DataError, name_some

BROKEN = "broken record"
DAMAGED = "damaged file"
NOT_UTF8 = "not UTF-8 text"
ROWS_AT_ONCE = 1024
KEPT_OF_BROKEN_CHARACTERS = 1000


class BadCorpusRecord(NamedTuple):
    """A record that is not a document."""

    where: str
    """The file, and the line or row."""
    reason: str
    detail: str
    text: str
    """The beginning of the record, as far as it can be shown as text."""


def read_records(file: SourceFile, name: str, text_key: str) -> Iterator[Document | BadCorpusRecord]:
    """Yield the records of a file: documents, and records that cannot be read as documents.

    Args:
        file: a source of any kind.
        name: the name of the file. A document without an `id` gets this name and its line as `id`.
        text_key: the key that holds the text of a record. All other keys are kept.

    Raises:
        DataError: if the file cannot be opened.
    """
    if file.kind == "parquet":
        yield from _table_rows(file, name, text_key)
    elif file.kind.startswith("jsonl"):
        yield from _json_lines(file, name, text_key)
    else:
        yield _text_file(file, name)


def read_text_lines(file: SourceFile) -> Iterator[str]:
    """Yield the lines of a text file. Bytes that are not UTF-8 are replaced by backslash escapes.

    Raises:
        DataError: if the file is damaged or cannot be read.
    """
    try:
        with open_source_file(file) as (lines, _):
            for line in lines:
                yield line.decode("utf-8", "backslashreplace")
    except DamagedError as error:
        raise DataError(f"cannot read {file.path}: {error}", "write it again") from error


def _text_file(file: SourceFile, name: str) -> Document | BadCorpusRecord:
    try:
        with open_source_file(file) as (stream, _):
            content = stream.read()
        return Document(text=content.decode("utf-8-sig"), id=name)
    except DamagedError as error:
        return BadCorpusRecord(f"{file.path}", DAMAGED, str(error), "")
    except UnicodeDecodeError as error:
        return BadCorpusRecord(f"{file.path}", NOT_UTF8, f"byte {error.start + 1}: {error.reason}", _shown(content))


def _json_lines(file: SourceFile, name: str, text_key: str) -> Iterator[Document | BadCorpusRecord]:
    number = 0
    try:
        with open_source_file(file) as (lines, _):
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    yield _document(_parse_line(line), f"{name}:{number}", text_key)
                except (ValueError, RecursionError) as error:
                    yield BadCorpusRecord(f"{file.path}, line {number}", BROKEN, str(error), _shown(line))
    except DamagedError as error:
        yield BadCorpusRecord(f"{file.path}, after line {number}", DAMAGED, str(error), "")


def _table_rows(file: SourceFile, name: str, text_key: str) -> Iterator[Document | BadCorpusRecord]:
    number = 0
    try:
        with open_source_file(file) as (stream, _):
            for batch in ParquetFile(stream).iter_batches(ROWS_AT_ONCE):
                for record in _rows_of(batch):
                    number += 1
                    try:
                        yield _document(_convert_row(record, text_key), f"{name}:{number}", text_key)
                    except ValueError as error:
                        yield BadCorpusRecord(f"{file.path}, row {number}", BROKEN, str(error), "")
    except (ArrowException, OSError) as error:
        yield BadCorpusRecord(f"{file.path}, after row {number}", DAMAGED, str(error), "")


def _rows_of(batch: RecordBatch) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Return the rows of a batch. A row that is not UTF-8 is replaced by its error.

    Arrow checks UTF-8 only here, and for the full batch.
    """
    try:
        return iter(batch.to_pylist())
    except UnicodeDecodeError:
        return (_row_of(batch, row) for row in range(batch.num_rows))


def _row_of(batch: RecordBatch, row: int) -> dict[str, Any] | UnicodeDecodeError:
    try:
        return batch.slice(row, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return error


def _convert_row(record: dict[str, Any] | UnicodeDecodeError, text_key: str) -> dict[str, Any]:
    """Return a row as JSON can store it, with times and similar values as strings.

    Raises:
        ValueError: if the row is not UTF-8, or its text is a value that would become a string.
    """
    if isinstance(record, UnicodeDecodeError):
        raise ValueError(f"not UTF-8 text (byte {record.start + 1}: {record.reason})")
    text = record.get(text_key)
    if not isinstance(text, str | int | float | list | dict | None):
        raise ValueError(f'the key "{text_key}" (text_key) holds {type(text).__name__} instead of text')
    return json.loads(json.dumps(record, default=str))


def _document(record: dict[str, Any], location: str, text_key: str) -> Document:
    if text_key not in record:
        keys = name_some([json.dumps(key) for key in record])
        raise ValueError(f'no key "{text_key}" (text_key); the keys are {keys}')
    text = record.pop(text_key)
    if not isinstance(text, str):
        raise ValueError(f'the key "{text_key}" (text_key) holds {json.dumps(text)[:40]} instead of text')
    own = record.pop("id", None)
    record.pop("text", None)
    name = location if own is None else own if isinstance(own, str) else json.dumps(own)
    return Document(text=text, id=name, metadata=record)


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (column {error.colno}: {error.msg})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start + 1}: {error.reason})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{json.dumps(record)[:40]} where an object is expected")
    if b"\\u" in line:
        _check_characters(record)
    return record


def _check_characters(record: dict[str, Any]) -> None:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds an unpaired surrogate, which is not a character") from None


def _shown(content: bytes) -> str:
    return content[:KEPT_OF_BROKEN_CHARACTERS].decode("utf-8", "backslashreplace")
