"""Content hashes of files.

They are cached by size and modification time, so that a second start reads nothing.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from xxhash import xxh3_128

from meshtrain import console
from meshtrain.data.cache import Cache, file_version, report_os_errors, write_atomically
from meshtrain.data.text.sources import SourceFile
from meshtrain.errors import DataError

CHUNK_BYTES = 1 << 22
MIN_PROGRESS_BYTES = 1 << 28
SETTLED_NANOSECONDS = 2_000_000_000

Entries = dict[str, list]
"""Path -> [bytes, modification time in nanoseconds, content hash]"""


def content_hashes(files: Sequence[SourceFile], cache: Cache) -> list[str]:
    """Return the content hash of each file. Only new and changed files are read.

    If several processes ask at once, one reads the files, and the others wait for its result.

    Raises:
        DataError: if a file cannot be read, or the cache cannot be written.
    """
    path = cache.directory / "content-hashes.json"
    with report_os_errors(path):
        before = file_version(path)
        known = _load(path)
    if any(_known_hash(known, file) is None for file in files):
        with cache.exclusive("content-hashes.lock", is_done=lambda: file_version(path) != before):
            known = _load(path)
            new = {str(file.path): file for file in files if _known_hash(known, file) is None}
            hashed = _hash_files(list(new.values()))
            kept = {name: entry for name, entry in known.items() if Path(name).exists()}
            settled = {name: hashed[name] for name in new if _is_settled(new[name])}
            with report_os_errors(path):
                write_atomically(path, json.dumps(kept | settled))
            known |= hashed
    return [known[str(file.path)][2] for file in files]


def _load(path: Path) -> Entries:
    return json.loads(path.read_text()) if path.exists() else {}


def _known_hash(known: Entries, file: SourceFile) -> str | None:
    num_bytes, modified, content_hash = known.get(str(file.path), (None, None, None))
    return content_hash if (num_bytes, modified) == (file.num_bytes, file.modified_nanoseconds) else None


def _is_settled(file: SourceFile) -> bool:
    # A file may change twice within one tick of its clock. So a fresh time stamp does not identify
    # the content yet.
    return time.time_ns() - file.modified_nanoseconds > SETTLED_NANOSECONDS


def _hash_files(files: list[SourceFile]) -> Entries:
    num_bytes = sum(file.num_bytes for file in files)
    if num_bytes < MIN_PROGRESS_BYTES:
        return {str(file.path): _entry(file) for file in files}
    entries = {}
    with console.progress("Hashing the sources", num_bytes, unit="MB") as advance:
        for file in files:
            entries[str(file.path)] = _entry(file)
            advance(file.num_bytes)
    return entries


def _entry(file: SourceFile) -> list:
    state = xxh3_128()
    try:
        with file.path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                state.update(chunk)
    except OSError as error:
        raise DataError(f"cannot read {file.path}: {error.strerror}", "fix its permissions or leave it out") from error
    return [file.num_bytes, file.modified_nanoseconds, state.hexdigest()]
