"""Shuffling and splitting depend only on the seed and the documents."""

from collections import Counter

import pytest
from datatrove.data import Document

from meshtrain.config.corpus import CorpusConfig, ShuffleConfig, SplitConfig
from meshtrain.corpus.steps.shuffle import choose_part, shuffling_passes, split_passes
from meshtrain.errors import DataError
from tests.corpus.preparations import read_shards, texts, write_shard

CONFIG = CorpusConfig(directory="/", sources=["a"], shuffle=ShuffleConfig())


def shuffled(directory, documents, *, num_shards=3, seed=0, bucket_megabytes=256.0):
    """Shuffle documents from some number of shards, one task after another."""
    for shard in range(num_shards):
        write_shard(directory / "in", f"{shard:05}", "gzip", documents[shard::num_shards])
    shuffle = ShuffleConfig(seed=seed, bucket_megabytes=bucket_megabytes)
    num_bytes = sum(len(document.text) for document in documents)
    passes = shuffling_passes(
        directory / "in", directory / "out", directory / "work", CONFIG, shuffle=shuffle, num_bytes=num_bytes
    )
    for shard_pass in passes:
        for rank in range(shard_pass.tasks):
            shard_pass.pipeline[0].run(None, rank, shard_pass.tasks)
    return passes, [record["text"] for record in read_shards(directory / "out")]


@pytest.fixture
def documents():
    return [Document(text=text, id=str(number)) for number, text in enumerate(texts(300))]


def test_shuffling_keeps_every_document_once_in_another_order(tmp_path, documents):
    _, order = shuffled(tmp_path, documents)

    before = [document.text for document in documents]
    assert sorted(order) == sorted(before)
    moved = [abs(before.index(text) - position) for position, text in enumerate(order)]
    assert 70 < sum(moved) / len(moved) < 130


def test_the_order_depends_on_the_seed_and_not_on_shards_or_buckets(tmp_path, documents):
    _, first = shuffled(tmp_path / "first", documents)
    _, again = shuffled(tmp_path / "again", documents[::-1], num_shards=7)
    passes, small = shuffled(tmp_path / "small", documents, bucket_megabytes=0.01)
    _, other = shuffled(tmp_path / "other", documents, seed=-1)

    assert passes[1].tasks > 5
    assert first == again == small
    assert first != other
    assert sorted(first) == sorted(other)


def test_too_many_buckets_are_refused(tmp_path):
    with pytest.raises(DataError) as caught:
        shuffling_passes(tmp_path, tmp_path, tmp_path, CONFIG, shuffle=ShuffleConfig(), num_bytes=10**12)
    assert str(caught.value) == (
        "shuffle.bucket_megabytes = 256 makes 3,907 buckets, more than 512 files that one task may write at once; "
        "set it to 1954 or more"
    )


def test_parts_have_the_asked_sizes_and_do_not_change_when_documents_are_added():
    config = SplitConfig(validation=0.1, test=0.05)
    parts = [choose_part(text, config) for text in texts(4000)]

    sizes = Counter(parts)
    assert 320 < sizes["validation"] < 480
    assert 140 < sizes["test"] < 260
    assert [choose_part(text, config) for text in texts(5000)][:4000] == parts
    assert {choose_part("x", SplitConfig(validation=0.0))} == {"train"}


def test_every_document_is_written_to_its_part(tmp_path, documents):
    write_shard(tmp_path / "in", "00000", "zstd", documents)
    (shard_pass,) = split_passes(tmp_path / "in", tmp_path / "out", SplitConfig(validation=0.3), "zstd")
    shard_pass.pipeline[0].run(None, 0, 1)

    train, validation = (
        [record["text"] for record in read_shards(tmp_path / "out" / part)] for part in ("train", "validation")
    )
    assert train + validation != []
    assert [choose_part(text, SplitConfig(validation=0.3)) for text in train] == ["train"] * len(train)
    assert sorted(train + validation) == sorted(document.text for document in documents)
    assert not (tmp_path / "out" / "test").exists()
