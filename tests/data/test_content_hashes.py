"""Content hashes: each file is read once, and again when it changes."""

import os
import time
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from meshtrain.data.cache import Cache
from meshtrain.data.text.content_hashes import content_hashes
from meshtrain.data.text.sources import SourceFile, find_files
from meshtrain.errors import DataError

OLD_NANOSECONDS = 10**18


def found(*paths: Path) -> list[SourceFile]:
    return find_files([str(path) for path in paths], key="data.train")


def write(path: Path, text: str, modified: int | None = OLD_NANOSECONDS) -> Path:
    path.write_text(text)
    if modified is not None:
        os.utime(path, ns=(modified, modified))
    return path


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


def test_the_hash_is_that_of_the_content(tmp_path, cache):
    a, b = write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")

    expected = [xxh3_128_hexdigest(b"one"), xxh3_128_hexdigest(b"two"), xxh3_128_hexdigest(b"one")]
    assert content_hashes(found(a, b, a), cache) == expected
    assert content_hashes(found(a, b, a), cache) == expected


def test_known_file_is_not_read_again(tmp_path, cache):
    path = write(tmp_path / "a.txt", "one")
    first = content_hashes(found(path), cache)
    # Size and time are the same, so the file counts as unchanged.
    write(path, "two")

    assert content_hashes(found(path), cache) == first


@pytest.mark.parametrize(("text", "modified"), [("three", OLD_NANOSECONDS), ("two", OLD_NANOSECONDS + 1)])
def test_changed_file_is_read_again(tmp_path, cache, text, modified):
    path = write(tmp_path / "a.txt", "one")
    content_hashes(found(path), cache)
    write(path, text, modified)

    assert content_hashes(found(path), cache) == [xxh3_128_hexdigest(text.encode())]


def test_a_fresh_time_stamp_is_not_trusted(tmp_path, cache):
    now = time.time_ns()
    path = write(tmp_path / "a.txt", "one", now)
    content_hashes(found(path), cache)
    write(path, "two", now)

    assert content_hashes(found(path), cache) == [xxh3_128_hexdigest(b"two")]


def test_deleted_files_are_forgotten(tmp_path, cache):
    a, b = write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")
    content_hashes(found(a), cache)
    a.unlink()
    content_hashes(found(b), cache)

    known = (cache.directory / "content-hashes.json").read_text()
    assert "b.txt" in known
    assert "a.txt" not in known


def test_unreadable_file_is_reported(tmp_path, cache):
    files = found(write(tmp_path / "a.txt", "one"))
    files[0].path.unlink()
    files[0].path.mkdir()

    with pytest.raises(DataError, match=r"a\.txt: Is a directory; fix its permissions or leave it out"):
        content_hashes(files, cache)


def test_large_files_show_progress(tmp_path, cache, capsys):
    path = tmp_path / "a.txt"
    with path.open("wb") as stream:
        stream.truncate(1 << 28)

    content_hashes(found(path), cache)

    assert "Hashing the sources  268.4/268.4 MB" in capsys.readouterr().out
