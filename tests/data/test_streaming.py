"""Streams: the same samples from any position on, read during training."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from meshtrain.config.data import DataConfig, MixedSourceConfig, TokenizerConfig
from meshtrain.data.cache import Cache
from meshtrain.data.prepare import prepare_data
from meshtrain.data.samples import stream_rows
from meshtrain.data.samples.dataset import Dataset, build_dataset
from meshtrain.data.samples.loader import build_loader
from meshtrain.data.samples.order import FILLER
from meshtrain.data.samples.stream import StreamSamples
from meshtrain.data.samples.stream_rows import Cursor, StreamReader
from meshtrain.errors import DataError
from tests.data.corpora import byte_tokenizer, expected_tokens, random_texts, write_lines

NUM_FILES, LENGTH = 3, 16


@pytest.fixture(scope="module")
def texts() -> list[list[str]]:
    """Return the texts of each file."""
    rng = random.Random(0)
    return [random_texts(rng, count=20) for _ in range(NUM_FILES)]


def configure(directory: Path, texts: list[list[str]], **options: Any) -> DataConfig:
    for number, of_file in enumerate(texts):
        write_lines(directory / f"{number}.jsonl", of_file)
    tokenizer = byte_tokenizer(Cache(directory / "cache"))
    defaults: dict[str, Any] = {
        "train": [f"{directory}/*.jsonl"],
        "streaming": True,
        "sequence_length": LENGTH,
        "shuffle_buffer": 10,
        "tokenizer": TokenizerConfig(path=str(tokenizer.directory)),
        "cache_directory": str(directory / "cache"),
    }
    return DataConfig(**{**defaults, **options})


def feed_of(config: DataConfig, seed: int = 0, batch: int = 4) -> Dataset:
    return build_dataset(prepare_data(config), global_batch_size=batch, seed=seed)


def reader_of(feed: Dataset) -> StreamReader:
    return feed.streams["data"]._reader


def test_rows_equal_those_of_the_full_text(tmp_path, texts):
    config = configure(tmp_path, texts, shuffle=False)
    tokenizer = byte_tokenizer(Cache(tmp_path / "cache"))
    documents = expected_tokens([text for of_file in texts for text in of_file], tokenizer)
    stream = np.concatenate(documents * 2)
    begins = np.zeros(len(stream), bool)
    begins[np.cumsum([0, *map(len, documents * 2)])[:-1]] = True
    reader = reader_of(feed_of(config))
    count = (len(stream) - 1) // LENGTH

    packed = list(islice(reader.packed_rows(Cursor(), LENGTH), count))
    padded = list(islice(reader.padded_rows(Cursor(), LENGTH), 2 * len(documents) - 1))

    for number, row in enumerate(packed):
        part = slice(number * LENGTH, number * LENGTH + LENGTH + 1)
        assert np.array_equal(row.tokens, stream[part])
        assert np.array_equal(row.begins, begins[part])
        assert row.trained.all()
    assert [row.tokens.tolist() for row in padded] == [one[:LENGTH] for one in documents * 2][:-1]


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_resume_from_the_cursor_of_any_row(tmp_path, texts, form, shuffle):
    reader = reader_of(feed_of(configure(tmp_path, texts, shuffle=shuffle)))
    rows_from = reader.packed_rows if form == "packed" else reader.padded_rows
    rows = list(islice(rows_from(Cursor(), LENGTH), 150))
    assert {row.cursor.epoch for row in rows} >= {0, 1}

    for start in (0, 1, 17, 58, 59, 60, 61, 100, 140):
        flat = json.loads(json.dumps(rows[start].cursor.flat()))
        again = list(islice(rows_from(Cursor.from_flat(tuple(flat)), LENGTH), 10))
        for one, other in zip(rows[start:], again, strict=False):
            assert one.cursor == other.cursor
            assert np.array_equal(one.tokens, other.tokens)
            assert np.array_equal(one.begins[1:], other.begins[1:])


def test_long_document_resumes_in_its_middle(tmp_path):
    rng = random.Random(0)
    lines = "".join(f"{'x' * rng.randrange(90)} line {number}\n" for number in range(80_000))
    (tmp_path / "long.txt").write_text(lines)
    config = configure(tmp_path, [], train=[str(tmp_path / "long.txt")], shuffle=False)
    reader = reader_of(feed_of(config))
    rows = list(islice(reader.packed_rows(Cursor(), 4096), 1080))
    assert {row.cursor.texts for row in rows} >= {0, 1}
    assert rows[-1].cursor.position.offset > 0

    for late in (rows[300], rows[700], rows[1000], rows[1050]):
        again = next(reader.packed_rows(late.cursor, 4096))
        assert np.array_equal(late.tokens, again.tokens), late.cursor
    assert [int(row.begins.sum()) for row in rows[:2]] == [1, 0]
    assert sum(int(row.begins[1:].sum()) for row in rows) == 0


def samples_of(feed: Dataset, start: int, stop: int, rank: int = 0, size: int = 1) -> list[tuple]:
    batches = build_loader(feed.samples, feed.order, dp_rank=rank, dp_size=size, start_step=start, stop_step=stop)
    return [
        (batch.sample_ids.tolist(), {name: tensor.tolist() for name, tensor in batch.tensors.items()})
        for batch in batches
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"documents": "separate"},
        {"form": "padded"},
        {"form": "padded", "pad_to_multiple_of": 4},
        {"shuffle": False},
        {"shuffle_buffer": 1},
        {"shuffle_buffer": 500},
    ],
    ids=str,
)
def test_stream_resumes_on_any_number_of_ranks(tmp_path, texts, options):
    config = configure(tmp_path, texts, **options)
    whole = samples_of(feed_of(config), 0, 30)
    for step in (1, 7, 20):
        first = feed_of(config)
        assert samples_of(first, 0, step) == whole[:step]
        # As in a checkpoint, the state goes through JSON while later batches are already read.
        state = {name: tuple(saved) for name, saved in json.loads(json.dumps(first.stream_state(step))).items()}
        parts = []
        for rank in range(2):
            resumed = feed_of(config)
            resumed.restore_streams(state)
            parts.append(samples_of(resumed, step, 30, rank, 2))
        for (ids, tensors), (_, one), (_, other) in zip(whole[step:], *parts, strict=True):
            assert tensors == {name: one[name] + other[name] for name in one}, ids


def test_buffer_is_shuffled_and_complete(tmp_path, texts):
    plain, shuffled = (feed_of(configure(tmp_path, texts[:1], shuffle=shuffle)) for shuffle in (False, True))
    ids = np.arange(20)

    first, second = plain.samples.read(ids)["input_ids"], shuffled.samples.read(ids)["input_ids"]

    assert not np.array_equal(first, second)
    for buffer in (slice(0, 10), slice(10, 20)):
        assert sorted(first[buffer].tolist()) == sorted(second[buffer].tolist())
    assert not np.array_equal(second, feed_of(configure(tmp_path, texts[:1]), seed=1).samples.read(ids)["input_ids"])


def test_going_back_reads_again(tmp_path, texts):
    samples = feed_of(configure(tmp_path, texts)).samples
    early = samples.read(np.array([3, FILLER, 12]))["input_ids"]
    samples.read(np.array([400]))

    assert np.array_equal(samples.read(np.array([3, FILLER, 12]))["input_ids"], early)


def test_without_tokens_a_plain_stream_is_not_opened(tmp_path, texts):
    feed = feed_of(configure(tmp_path, texts))
    ids = np.array([0, 5, FILLER])
    blank = feed.samples.read(ids, with_tokens=False)

    assert isinstance(feed.samples, StreamSamples)
    assert feed.samples._next_buffer == -1
    whole = feed.samples.read(ids)
    assert blank.keys() == whole.keys()
    assert np.array_equal(blank["labels"] < 0, whole["labels"] < 0)


def test_stream_is_part_of_a_mixture(tmp_path, texts):
    config = configure(tmp_path, texts)
    sources = {
        "streamed": MixedSourceConfig(train=config.train, streaming=True, weight=3.0),
        "stored": MixedSourceConfig(train=[str(tmp_path / "0.jsonl")]),
    }
    mixed = DataConfig(
        sources=sources,
        sequence_length=LENGTH,
        shuffle_buffer=10,
        tokenizer=config.tokenizer,
        cache_directory=config.cache_directory,
    )
    whole = samples_of(feed_of(mixed), 0, 40)
    first = feed_of(mixed)
    samples_of(first, 0, 17)
    resumed = feed_of(mixed)
    resumed.restore_streams(first.stream_state(17))

    assert samples_of(resumed, 17, 40) == whole[17:]
    assert first.order.samples_before(16) == {"streamed": 48, "stored": 16}
    assert first.stream_state(17).keys() == {"streamed"}


def test_urls_are_streamed(tmp_path, texts):
    store = MemoryFileSystem()
    for number, of_file in enumerate(texts):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in of_file)
        store.pipe(f"/corpus/{number}.jsonl", lines.encode())
    local = feed_of(configure(tmp_path, texts))
    remote = feed_of(configure(tmp_path, texts, train=["memory://corpus/*.jsonl"]))
    ids = np.arange(30)

    assert np.array_equal(local.samples.read(ids)["input_ids"], remote.samples.read(ids)["input_ids"])


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ("memory://nowhere/*.jsonl", "data.train: memory://nowhere/*.jsonl matches no file that holds anything"),
        ("memory://nowhere/a.jsonl", "data.train: memory://nowhere/a.jsonl cannot be reached: "),
        ("memory://table.csv", 'data.train: "memory://table.csv" is not of a known kind; use one of '),
    ],
)
def test_urls_without_files_are_reported(tmp_path, train, problem):
    MemoryFileSystem().pipe("/table.csv", b"a,b")
    with pytest.raises(DataError) as caught:
        prepare_data(configure(tmp_path, [], train=[train]))
    assert caught.value.lines[0].startswith(problem)


def test_bad_record_is_reported_when_it_is_reached(tmp_path, texts):
    config = configure(tmp_path, texts[:1], shuffle=False)
    with (tmp_path / "0.jsonl").open("a") as stream:
        stream.write("broken\n")
    feed = feed_of(config)
    with pytest.raises(
        DataError, match=r"0\.jsonl, line 21: not JSON \(column 1: Expecting value\); fix it, or"
    ) as caught:
        samples_of(feed, 0, 100)
    # It is one line, without the traceback of the thread that reads.
    assert caught.value.lines[0].startswith(str(tmp_path))
    skipping = config.model_copy(update={"on_bad_record": "skip"})
    assert samples_of(feed_of(skipping), 0, 30) == samples_of(
        feed_of(configure(tmp_path, texts[:1], shuffle=False)), 0, 30
    )


def test_run_that_failed_at_a_record_resumes_without_it(tmp_path, texts):
    config = configure(tmp_path, texts[:1])
    skipping = config.model_copy(update={"on_bad_record": "skip"})
    assert prepare_data(config).identity == prepare_data(skipping).identity


def test_skipped_records_are_reported_once(tmp_path, texts, capsys):
    config = configure(tmp_path, texts[:1], on_bad_record="skip", shuffle=False)
    with (tmp_path / "0.jsonl").open("a") as stream:
        stream.write("broken\n" * 5)
    num_tokens = sum(map(len, expected_tokens(texts[0], byte_tokenizer(Cache(tmp_path / "cache")))))
    list(islice(reader_of(feed_of(config)).packed_rows(Cursor(), LENGTH), 3 * num_tokens // LENGTH))

    lines = capsys.readouterr().err.splitlines()
    assert [f"line {number}: not JSON" in line for number, line in zip((21, 22, 23), lines, strict=False)] == [True] * 3
    assert lines[2].endswith("; left out; more are only counted")
    assert lines[3].endswith("0.jsonl: 5 bad records were left out of the stream's first pass")
    assert len(lines) == 4


def test_only_the_used_part_of_a_long_document_is_kept(tmp_path, texts, monkeypatch):
    (tmp_path / "long.txt").write_text("".join(f"line {number}\n" for number in range(400_000)))
    write_lines(tmp_path / "short.jsonl", texts[0])
    names = [str(tmp_path / name) for name in ("long.txt", "short.jsonl")]
    reader = reader_of(feed_of(configure(tmp_path, [], train=names, shuffle=False)))
    kept = []
    add = stream_rows._Pieces.add
    monkeypatch.setattr(
        stream_rows._Pieces, "add", lambda pieces, row: (add(pieces, row), kept.append(len(row.tokens)))
    )

    row = next(reader.padded_rows(Cursor(), LENGTH))

    assert len(row.tokens) == LENGTH
    assert len(kept) == 1


def test_stream_without_text_is_refused(tmp_path):
    config = configure(tmp_path, [["", ""]])
    with pytest.raises(DataError, match=r"0\.jsonl and the files after it: no text found to stream"):
        samples_of(feed_of(config), 0, 1)


def test_table_at_a_url_is_streamed(tmp_path, texts):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with MemoryFileSystem().open("/tables/a.parquet", "wb") as stream:
        parquet.write_table(arrow.table({"text": texts[0]}), stream, row_group_size=7)
    lines = feed_of(configure(tmp_path, texts[:1], shuffle=False))
    table = feed_of(configure(tmp_path, texts[:1], shuffle=False, train=["memory://tables/a.parquet"]))
    ids = np.arange(30)

    assert np.array_equal(lines.samples.read(ids)["input_ids"], table.samples.read(ids)["input_ids"])
    state = table.stream_state(5)
    resumed = feed_of(configure(tmp_path, texts[:1], shuffle=False, train=["memory://tables/a.parquet"]))
    resumed.restore_streams(state)
    assert np.array_equal(resumed.samples.read(ids[20:])["input_ids"], lines.samples.read(ids[20:])["input_ids"])


class UnreliableFileSystem(MemoryFileSystem):
    """A file system whose library has its own exceptions."""

    protocol = "unreliable"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).replace("unreliable://", "memory://"))

    def _open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("503 slow down")


def test_error_of_a_url_library_is_one_line(tmp_path):
    register_implementation("unreliable", UnreliableFileSystem, clobber=True)
    MemoryFileSystem().pipe("/store/a.jsonl", b'{"text": "x"}\n')
    feed = feed_of(configure(tmp_path, [], train=["unreliable://store/a.jsonl"]))
    with pytest.raises(DataError, match=r"a\.jsonl and the files after it cannot be read: 503 slow down"):
        samples_of(feed, 0, 1)
