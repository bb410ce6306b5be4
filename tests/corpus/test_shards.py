"""Shards: the same documents make the same bytes, and every file is complete."""

import time

import pytest
from datatrove.data import Document

from meshtrain.corpus.steps.shards import RollingWriter, list_shards, read_lines, read_shard
from meshtrain.errors import DataError
from tests.corpus.preparations import write_shard

DOCUMENTS = [
    Document(text="grüß dich\u2028日本 🦜", id="a.jsonl:1", metadata={"url": "http://example.org/", "n": 2**70}),
    Document(text='"quoted" \\ \r\n', id="b", metadata={"nested": {"list": [1, None, True]}}),
]


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_documents_are_read_as_they_were_written(tmp_path, compression):
    write_shard(tmp_path, "00000", compression, DOCUMENTS)

    (shard,) = list_shards(tmp_path)
    assert list(read_shard(shard)) == DOCUMENTS
    assert [path.name for path in tmp_path.iterdir()] == [shard.name]


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_the_same_documents_make_the_same_bytes_at_another_time_and_path(tmp_path, compression):
    write_shard(tmp_path / "one", "00000", compression, DOCUMENTS)
    time.sleep(1.1)
    write_shard(tmp_path / "two", "00007", compression, DOCUMENTS)

    (one,), (two,) = list_shards(tmp_path / "one"), list_shards(tmp_path / "two")
    assert one.read_bytes() == two.read_bytes()


def test_a_shard_without_documents_makes_no_file(tmp_path):
    write_shard(tmp_path / "none", "00000", "gzip", [])

    assert not (tmp_path / "none").exists()


def test_an_unfinished_shard_leaves_no_file(tmp_path):
    def broken():
        yield DOCUMENTS[0]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_shard(tmp_path, "00000", "gzip", broken())

    assert list(tmp_path.iterdir()) == []


def test_a_full_shard_is_followed_by_another(tmp_path):
    with RollingWriter(tmp_path, "00003", "gzip", shard_bytes=20) as writer:
        for number in range(7):
            writer.write(b'{"text": %d}\n' % number)

    shards = list_shards(tmp_path)
    assert [shard.name for shard in shards] == [f"00003-0000{number}.jsonl.gz" for number in range(4)]
    assert [len(list(read_lines(shard))) for shard in shards] == [2, 2, 2, 1]


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_damaged_shard_is_named(tmp_path, compression):
    write_shard(tmp_path, "00000", compression, DOCUMENTS * 100)
    (shard,) = list_shards(tmp_path)
    content = shard.read_bytes()
    shard.write_bytes(content[:40] + b"\x00" * 10 + content[50:])

    with pytest.raises(DataError, match=f"cannot read {shard}: .*redo the step that wrote it"):
        list(read_lines(shard))


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*00000.jsonl.gz: No such file or directory"):
        list(read_lines(tmp_path / "00000.jsonl.gz"))
