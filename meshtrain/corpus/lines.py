"""Shards of documents: gzipped JSON lines, of which every line is accounted for."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from meshtrain.errors import DataError

ENDING = ".jsonl.gz"
COMPRESSION_LEVEL = 1
"""Shards are read again soon: at level 9 to write them would cost more than all the rest."""


class Line(NamedTuple):
    """A document, as it stands in its shard and as it is understood."""

    raw: bytes
    record: dict[str, Any]


def shard_names(directory: Path) -> list[str]:
    """Return the names of the shards in a directory, without their ending, in order.

    Raises:
        DataError: there are none.
    """
    names = sorted(path.name.removesuffix(ENDING) for path in directory.glob(f"*{ENDING}"))
    if not names:
        raise DataError(f"{directory}: no shards (*{ENDING}) are here; run the step before this one first")
    return names


def read_shard(path: Path) -> Iterator[Line]:
    """Yield the documents of a shard.

    Raises:
        DataError: the shard is damaged, or a line is not a document; with the file and the line.
    """
    try:
        with gzip.open(path, "rb") as lines:
            for number, raw in enumerate(lines, 1):
                yield Line(raw, _record(raw, f"{path}, line {number}"))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"cannot read {path}: {error}; the shard is damaged, remove it and write it again") from error


def _record(raw: bytes, where: str) -> dict[str, Any]:
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error}); write the shard again") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: not a JSON object; write the shard again")
    for key in ("text", "id"):
        if not isinstance(record.get(key), str):
            raise DataError(f'{where}: no text under the key "{key}"; every document needs one')
    return record


@contextmanager
def written_shard(path: Path) -> Iterator[gzip.GzipFile]:
    """Write a shard beside its place, and put it there when it is complete; the same lines make the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as raw, gzip.GzipFile("", "wb", COMPRESSION_LEVEL, raw, mtime=0) as lines:
        yield lines
    partial.rename(path)
