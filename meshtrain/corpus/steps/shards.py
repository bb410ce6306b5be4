"""Shards: the files of JSON lines between two steps. The same documents make the same bytes, and a file is whole.

A line is a document: `text`, `id`, and whatever else came with it (`url`, ...), in that order. A dropped document also
has a `reason`, and a `detail` where there is more to say.
"""

import gzip
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, Self

import zstandard
from datatrove.data import Document

from meshtrain.data.text.byte_streams import DamagedError, opened
from meshtrain.data.text.sources import Kind, SourceFile
from meshtrain.errors import DataError

Compression = Literal["gzip", "zstd", "none"]
SUFFIXES: dict[Compression, str] = {"gzip": ".jsonl.gz", "zstd": ".jsonl.zst", "none": ".jsonl"}
GROUPS_NAME = "groups.jsonl"
"""Which documents are near duplicates of which; beside the shards of those that go."""
PARTIAL = ".partial"
GZIP_LEVEL = 4
ZSTD_LEVEL = 3


def list_shards(directory: Path) -> list[Path]:
    """Return the shards in a directory, sorted by name; those in directories below it are not its own.

    Beside them may lie GROUPS_NAME, which holds no documents.
    """
    found = (path for suffix in SUFFIXES.values() for path in directory.glob(f"*{suffix}"))
    return sorted(path for path in found if path.name != GROUPS_NAME)


def shard_name(path: Path) -> str:
    """Return the name of a shard without what says how it is written."""
    return path.name.partition(".")[0]


def remove_partials(directory: Path) -> None:
    """Remove what a killed task left behind: files, and directories with all that is in them."""
    for path in sorted(directory.rglob(f"*{PARTIAL}")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            # It may have been in such a directory.
            path.unlink(missing_ok=True)


def as_line(document: Document) -> bytes:
    """Write a document as a line."""
    record = {"text": document.text, "id": document.id, **document.metadata}
    # json and not orjson: it keeps whole numbers of any size and NaN as they are.
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def as_document(line: bytes) -> Document:
    """Read a line that `as_line` wrote."""
    record = json.loads(line)
    return Document(text=record.pop("text"), id=record.pop("id"), metadata=record)


def _kind_of(path: Path) -> Kind:
    kinds: dict[str, Kind] = {".gz": "jsonl.gz", ".zst": "jsonl.zst", ".jsonl": "jsonl"}
    return kinds[path.suffix]


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a shard.

    Raises:
        DataError: if it is damaged or cannot be read.
    """
    try:
        with opened(SourceFile(path, _kind_of(path), 0, 0)) as (lines, _):
            yield from lines
    except DamagedError as error:
        raise DataError(f"cannot read {path}: {error}; redo the step that wrote it (--redo)") from error


def read_shard(path: Path) -> Iterator[Document]:
    """Yield the documents of a shard.

    Raises:
        DataError: if it is damaged or cannot be read.
    """
    return map(as_document, read_lines(path))


@contextmanager
def _compressed(raw: BinaryIO, compression: Compression) -> Iterator[BinaryIO]:
    if compression == "gzip":
        # Neither a name nor a time: they would make the same documents different bytes.
        with gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0) as stream:
            yield stream  # type: ignore[misc]
    elif compression == "none":
        yield raw
    else:
        packer = zstandard.ZstdCompressor(ZSTD_LEVEL, write_checksum=True)
        with packer.stream_writer(raw, closefd=False) as stream:
            yield stream


class ShardWriter:
    """Writes one shard, a context manager. The file appears when it is whole; without any line it does not.

    Args:
        directory: made if it is not there.
        name: of the shard.
        compression: of the file.
    """

    def __init__(self, directory: Path, name: str, compression: Compression) -> None:
        self.num_lines = 0
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
        """Add a line, which ends with a line feed."""
        if self._raw is None:
            self._open()
        self._lines.write(line)
        self.num_lines += 1
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
    """Writes shards `NAME-00000`, `NAME-00001`, ... of about the same size, a context manager."""

    def __init__(self, directory: Path, name: str, compression: Compression, shard_bytes: float) -> None:
        self.num_lines = 0
        self._place = directory, name, compression
        self._shard_bytes = shard_bytes
        self._num_shards = 0
        self._writer = self._next_writer()

    def __enter__(self) -> Self:
        return self

    def write(self, line: bytes) -> None:
        """Add a line, which ends with a line feed."""
        if self._writer.num_bytes >= self._shard_bytes:
            self._writer.__exit__(None)
            self._writer = self._next_writer()
        self._writer.write(line)
        self.num_lines += 1

    def __exit__(self, *exception: object) -> None:
        self._writer.__exit__(*exception)

    def _next_writer(self) -> ShardWriter:
        directory, name, compression = self._place
        self._num_shards += 1
        return ShardWriter(directory, f"{name}-{self._num_shards - 1:05}", compression)


def write_shard(directory: Path, name: str, compression: Compression, documents: Iterable[Document]) -> None:
    """Write documents into one shard."""
    with ShardWriter(directory, name, compression) as writer:
        for document in documents:
            writer.write(as_line(document))
