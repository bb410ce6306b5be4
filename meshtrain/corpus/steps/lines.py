"""Lines of shards: what is expected of a document, and of a directory with documents."""

import json
from pathlib import Path
from typing import Any

import orjson

from meshtrain.corpus.steps.shards import SUFFIXES, Compression, list_shards
from meshtrain.errors import DataError


def existing_shards(directory: Path) -> list[Path]:
    """Return the shards in a directory, sorted by name.

    Raises:
        DataError: there are none.
    """
    shards = list_shards(directory)
    if not shards:
        endings = ", ".join(f"*{suffix}" for suffix in SUFFIXES.values())
        raise DataError(f"{directory}: there are no shards ({endings}); run the step before this one first")
    return shards


def compression_of(shard: Path) -> Compression:
    """Return how a shard is compressed."""
    return next(compression for compression, suffix in SUFFIXES.items() if shard.name.endswith(suffix))


def understood(line: bytes, shard: Path, place: int) -> dict[str, Any]:
    """Return the document of a line.

    Args:
        line: as it stands in the shard.
        shard: for messages.
        place: of the line in the shard, from zero.

    Raises:
        DataError: it is not a document; with the file and the line.
    """
    where = f"{shard}, line {place + 1}"
    record = _parsed(line, where)
    if not isinstance(record, dict):
        raise DataError(f"{where}: not a JSON object; redo the step that wrote it (--redo)")
    for key in ("text", "id"):
        if not isinstance(record.get(key), str):
            raise DataError(f'{where}: no text under the key "{key}"; every document needs one')
    return record


def _parsed(line: bytes, where: str) -> object:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        # It refuses NaN and half surrogate pairs, which others write.
        try:
            return json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error}); redo the step that wrote it (--redo)") from None
