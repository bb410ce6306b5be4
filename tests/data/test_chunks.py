"""Chunks: reading resumes from any position, for every kind of file."""

import gzip
import itertools
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet
import pytest
import zstandard

from meshtrain.data.text import chunks
from meshtrain.data.text.chunks import Chunk, read_chunks
from meshtrain.data.text.corpus import START, Corpus
from meshtrain.data.text.records import BadRecord, parse
from meshtrain.data.text.sources import find_files
from meshtrain.data.tokens import cutting
from meshtrain.data.tokens.cutting import Cutter
from meshtrain.errors import DataError
from tests.data.corpora import write_lines


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Hold texts of every kind, in files of several chunks each."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 12)
    for module in (chunks, cutting):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 1 << 14)
    texts = [f"document {number} 日本語\n" * (number % 7) for number in range(300)]
    lines = write_lines(tmp_path / "a.jsonl", texts).read_bytes() + b"broken\n"
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines) + gzip.compress(lines))
    (tmp_path / "c.json.zst").write_bytes(zstandard.compress(lines))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-9])
    text = "\ufeff" + "".join(f"line {number} grüß 日本語\n" for number in range(3000))
    (tmp_path / "d.txt").write_text(text)
    (tmp_path / "e.txt.zst").write_bytes(zstandard.compress(text.encode()))
    (tmp_path / "f.txt").write_text("short")
    arrow.parquet.write_table(arrow.table({"text": [*texts, None]}), tmp_path / "g.parquet", row_group_size=100)
    return Corpus(tuple(find_files([str(tmp_path)], key="data.train")), ())


def records_of(found: list[Chunk]) -> list:
    return [record for chunk in found for record in parse(chunk, "text", setting="data.text_key")]


def text_of(found: list[Chunk]) -> str:
    """Join all texts: pieces of a document may be cut elsewhere."""
    records = records_of(found)
    return "".join(
        record.message if isinstance(record, BadRecord) else record.text + "\0" * record.ends_document
        for record in records
    )


def test_reading_resumes_from_the_end_of_any_chunk(corpus):
    found = list(read_chunks(corpus, Cutter(), START))

    assert len(found) > 80
    for number, chunk in enumerate(found, 1):
        if chunk.kind == "damage":
            continue
        rest = list(read_chunks(corpus, Cutter(), chunk.end))
        assert text_of(rest) == text_of(found[number:])
        assert sum(chunk.disk_bytes for chunk in rest) == sum(chunk.disk_bytes for chunk in found[number:])


def test_every_byte_on_disk_is_counted_once(corpus):
    found = list(read_chunks(corpus, Cutter(), START))

    assert sum(chunk.disk_bytes for chunk in found) == corpus.num_bytes
    assert all(chunk.disk_bytes >= 0 for chunk in found)
    by_file = {file: [*found] for file, found in itertools.groupby(found, lambda chunk: chunk.location.split(",")[0])}
    assert len(by_file) == 8


def test_long_text_with_bad_utf8_at_its_end_is_reported(corpus, tmp_path):
    place = tmp_path / "d.txt"
    place.write_bytes(place.read_bytes() + b"caf\xe9")
    size = place.stat().st_size

    problems = [
        record for record in records_of(list(read_chunks(corpus, Cutter(), START))) if isinstance(record, BadRecord)
    ]

    assert f"{place}: not UTF-8 text (byte {size:,}: unexpected end of data)" in [
        problem.message for problem in problems
    ]


def test_long_text_that_cannot_be_cut_is_damage(tmp_path, monkeypatch):
    for module in (chunks, cutting):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 1 << 10)
    monkeypatch.setattr(cutting, "MAX_PIECE_CHARACTERS", 1 << 12)
    (tmp_path / "a.txt").write_text("line of words\n" * 100 + "x" * 10_000)
    corpus = Corpus(tuple(find_files([str(tmp_path)], key="data.train")), ())

    *texts, problem, end = records_of(list(read_chunks(corpus, Cutter(), START)))

    assert problem.is_damage
    start = len("".join(record.text for record in texts)) + 1
    assert problem.message.startswith(f"{tmp_path}/a.txt, from byte {start:,} on: the document is longer than 4,096 ")
    assert (end.text, end.ends_document) == ("", True)


def test_a_file_that_is_gone(corpus, tmp_path):
    (tmp_path / "g.parquet").unlink()
    problem = f"cannot read {tmp_path}/g.parquet: No such file or directory; fix it or leave it out"

    with pytest.raises(DataError) as caught:
        list(read_chunks(corpus, Cutter(), START))

    assert str(caught.value) == problem
