"""Shards: the files of JSON lines between two steps.

The same documents always make the same bytes. A shard appears only when it is complete.
A line is a document: `text`, `id`, and then its other keys, such as `url`. A dropped document
also has a `reason`, and some reasons have a `detail`.
"""

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import orjson
import zstandard
from datatrove.data import Document

from meshtrain.data.text.byte_streams import DamagedError, open_source_file
from meshtrain.data.text.sources import FileKind, SourceFile
from meshtrain.errors import DataError

Compression = Literal["gzip", "zstd", "none"]
SUFFIXES: dict[Compression, str] = {"gzip": ".jsonl.gz", "zstd": ".jsonl.zst", "none": ".jsonl"}
GROUPS_NAME = "groups.jsonl"
"""The groups of near duplicates. This file is stored beside the shards of removed documents."""
PARTIAL = ".partial"
GZIP_LEVEL = 4
ZSTD_LEVEL = 3


def list_shards(directory: Path) -> list[Path]:
    """Return the shards in a directory, sorted by name, without those in its subdirectories.

    The file GROUPS_NAME is left out, because it holds no documents.
    """
    found = (path for suffix in SUFFIXES.values() for path in directory.glob(f"*{suffix}"))
    return sorted(path for path in found if path.name != GROUPS_NAME)


def existing_shards(directory: Path) -> list[Path]:
    """Return the shards in a directory, sorted by name.

    Raises:
        DataError: if there are no shards.
    """
    shards = list_shards(directory)
    if not shards:
        endings = ", ".join(f"*{suffix}" for suffix in SUFFIXES.values())
        raise DataError(f"{directory}: there are no shards ({endings})", "run the step before this one first")
    return shards


def compression_of(shard: Path) -> Compression:
    """Return the compression of a shard."""
    return next(compression for compression, suffix in SUFFIXES.items() if shard.name.endswith(suffix))


def shard_name(path: Path) -> str:
    """Return the name of a shard without its suffixes."""
    return path.name.partition(".")[0]


def remove_partials(directory: Path) -> None:
    """Remove the incomplete files and directories that a killed task left behind."""
    for path in sorted(directory.rglob(f"*{PARTIAL}")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            # The file may have been inside a directory that was just removed.
            path.unlink(missing_ok=True)


def as_line(document: Document) -> bytes:
    """Return the line of a document."""
    record = {"text": document.text, "id": document.id, **document.metadata}
    # orjson cannot write integers over 64 bits, and writes NaN as null.
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def as_document(line: bytes) -> Document:
    """Return the document of a line that `as_line` wrote."""
    record = json.loads(line)
    return Document(text=record.pop("text"), id=record.pop("id"), metadata=record)


def parse_document(line: bytes, shard: Path, position: int) -> dict[str, Any]:
    """Return the document of a line, and check that it is one.

    Args:
        line: a line of the shard.
        shard: the path of the shard, for error messages.
        position: the index of the line in the shard, from zero.

    Raises:
        DataError: if the line is not a document. The message names the shard and the line.
    """
    where = f"{shard}, line {position + 1}"
    record = _parse_json(line, where)
    if not isinstance(record, dict):
        raise DataError(f"{where}: not a JSON object", "redo the step that wrote it (--redo)")
    for key in ("text", "id"):
        if not isinstance(record.get(key), str):
            raise DataError(f'{where}: no text under the key "{key}"', "add one to every document")
    return record


def _parse_json(line: bytes, where: str) -> object:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        # orjson rejects NaN and unpaired surrogates, which other programs write.
        try:
            return json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error})", "redo the step that wrote it (--redo)") from None


def _kind_of(path: Path) -> FileKind:
    kinds: dict[str, FileKind] = {".gz": "jsonl.gz", ".zst": "jsonl.zst", ".jsonl": "jsonl"}
    return kinds[path.suffix]


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a shard.

    Raises:
        DataError: if the shard is damaged or cannot be read.
    """
    try:
        with open_source_file(SourceFile(path, _kind_of(path), 0, 0)) as (lines, _):
            yield from lines
    except DamagedError as error:
        raise DataError(f"cannot read {path}: {error}", "redo the step that wrote it (--redo)") from error


def read_shard(path: Path) -> Iterator[Document]:
    """Yield the documents of a shard.

    Raises:
        DataError: if the shard is damaged or cannot be read.
    """
    return map(as_document, read_lines(path))


@contextmanager
def _compressed(raw: BinaryIO, compression: Compression) -> Iterator[BinaryIO]:
    if compression == "gzip":
        # The header gets no name and no time, so that the same documents make the same bytes.
        with gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0) as stream:
            yield stream  # type: ignore[misc]
    elif compression == "none":
        yield raw
    else:
        packer = zstandard.ZstdCompressor(ZSTD_LEVEL, write_checksum=True)
        with packer.stream_writer(raw, closefd=False) as stream:
            yield stream


class ShardWriter:
    """Writes one shard; a context manager. The file appears when it is complete.

    No file is written if there are no lines.

    Args:
        directory: the directory of the shard, which is created if it is missing.
        name: the name of the shard, without suffix.
        compression: the compression of the file.
    """

    def __init__(self, directory: Path, name: str, compression: Compression) -> None:
        self.num_bytes = 0
        self._path = directory / f"{name}{SUFFIXES[compression]}"
        self._partial = self._path.with_name(f"{self._path.name}-{os.getpid()}{PARTIAL}")
        self._compression = compression
        self._raw: BinaryIO | None = None
        self._stream: AbstractContextManager[BinaryIO]
        self._lines: BinaryIO

    def __enter__(self) -> Self:
        return self

    def write(self, line: bytes) -> None:
        """Write a line, which must end with a line feed."""
        if self._raw is None:
            self._open()
        self._lines.write(line)
        self.num_bytes += len(line)

    def __exit__(self, *exception: object) -> None:
        if self._raw is None:
            return
        with self._raw as raw:
            self._stream.__exit__(None, None, None)
            raw.flush()
            os.fsync(raw.fileno())
        if exception[0] is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._raw = self._partial.open("wb")
        self._stream = _compressed(self._raw, self._compression)
        self._lines = self._stream.__enter__()


class RollingWriter:
    """Writes shards `NAME-00000`, `NAME-00001` and so on, of similar size; a context manager.

    Args:
        directory: the directory of the shards, which is created if it is missing.
        name: the first part of the names of the shards.
        compression: the compression of the shards.
        shard_bytes: the uncompressed size after which the next shard begins.
    """

    def __init__(self, directory: Path, name: str, compression: Compression, shard_bytes: float) -> None:
        self._location = directory, name, compression
        self._shard_bytes = shard_bytes
        self._num_shards = 0
        self._writer = self._next_writer()

    def __enter__(self) -> Self:
        return self

    def write(self, line: bytes) -> None:
        """Write a line, which must end with a line feed."""
        if self._writer.num_bytes >= self._shard_bytes:
            self._writer.__exit__(None)
            self._writer = self._next_writer()
        self._writer.write(line)

    def __exit__(self, *exception: object) -> None:
        self._writer.__exit__(*exception)

    def _next_writer(self) -> ShardWriter:
        directory, name, compression = self._location
        self._num_shards += 1
        return ShardWriter(directory, f"{name}-{self._num_shards - 1:05}", compression)
