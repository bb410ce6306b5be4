"""Byte streams: the decompressed content of source files.

A compressed file that was cut short is reported as damaged, and never taken for a shorter file.
"""

import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from meshtrain.data.text.sources import SourceFile
from meshtrain.errors import DataError, reason_of

READ_BYTES = 1 << 18
MAX_ZSTD_WINDOW = 1 << 31
"""The largest window of the format, which `zstd --long=31` writes."""

GZIP_EXTRA_FIELD = 4
BGZF_HEADER_BYTES = 18
BGZF_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
"""The empty block that ends every bgzip file.

Without it, a file that was cut between blocks would look complete.
"""


class DamagedError(Exception):
    """From here on, the content of a file does not match its kind."""


@contextmanager
def open_source_file(file: SourceFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a source file for reading.

    Yields:
        The stream of the decompressed content, and the raw stream, whose position is the progress.

    Raises:
        DataError: if it cannot be opened.
        DamagedError: while it is read.
    """
    try:
        raw = file.path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {file.path}: {reason_of(error)}", "fix it or leave it out") from error
    with raw:
        if file.kind.endswith(".gz"):
            _check_bgzf(raw)
            yield io.BufferedReader(_GzipReader(raw), READ_BYTES), raw
        elif file.kind.endswith(".zst"):
            yield io.BufferedReader(_ZstdReader(raw, file), READ_BYTES), raw
        else:
            yield raw, raw


def seek_forward(stream: BinaryIO, offset: int) -> None:
    """Move a stream forward to an offset of its content."""
    if stream.seekable():
        stream.seek(offset)
        return
    while offset > 0:
        offset -= len(stream.read(min(offset, READ_BYTES)))


class _GzipReader(io.RawIOBase):
    """Reads all members of a gzip file."""

    def __init__(self, raw: BinaryIO) -> None:
        self._gzip = gzip.GzipFile(fileobj=raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            # readinto would lose what it read before the damage.
            content = self._gzip.read1(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedError(f"the gzip file is damaged: {error}") from error
        buffer[: len(content)] = content
        return len(content)


def _check_bgzf(raw: BinaryIO) -> None:
    """Check that a bgzip file has its last block. Other files are not checked."""
    header = raw.read(BGZF_HEADER_BYTES)
    has_extra = len(header) == BGZF_HEADER_BYTES and header[3] & GZIP_EXTRA_FIELD
    if has_extra and header[12:14] == b"BC" and struct.unpack_from("<H", header, 14) == (2,):
        raw.seek(max(0, raw.seek(0, io.SEEK_END) - len(BGZF_END)))
        if raw.read() != BGZF_END:
            raise DamagedError(
                "the gzip file is damaged: it was written by bgzip, and the last block is missing, so it was cut short"
            )
    raw.seek(0)


class _ZstdReader(io.RawIOBase):
    """Reads all frames of a zstd file.

    The stream class of zstandard is not used, because it does not detect a file that was cut short.
    """

    def __init__(self, raw: BinaryIO, file: SourceFile) -> None:
        try:
            import zstandard  # noqa: PLC0415 - of an extra
        except ImportError as error:
            raise DataError(f'{file.path}: reading it needs another package: pip install "meshtrain[data]"') from error
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).decompressobj
        self._frame: Any = None
        self._raw = raw
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            compressed = self._compressed or self._raw.read(READ_BYTES)
            if not compressed:
                if self._frame is not None:
                    raise DamagedError("the zstd file is damaged: it ends within a frame, so it was cut short")
                return 0
            self._decompress(compressed)
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _decompress(self, compressed: bytes) -> None:
        self._frame = self._frame or self._new_frame()
        try:
            self._content = memoryview(self._frame.decompress(compressed))
        except self._error as error:
            raise DamagedError(f"the zstd file is damaged: {error}") from error
        self._compressed = b""
        if self._frame.eof:
            self._compressed, self._frame = self._frame.unused_data, None
