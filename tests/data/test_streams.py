"""Compressed files and tables: they are read completely, or reported as damaged."""

import gzip
import json
import struct
import sys
import zlib
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet
import pytest
import zstandard

from meshtrain.data.text.parquet import BATCH_ROWS
from meshtrain.errors import DataError
from tests.data.corpora import read_pieces, write_lines

TEXTS = [f"document {number} of some words and 日本語\r\n" for number in range(3000)]
ADVICE = '; fix it, or leave such records out with data.on_bad_record = "skip"'


@pytest.fixture
def lines(tmp_path) -> bytes:
    path = write_lines(tmp_path / "lines", TEXTS)
    content = path.read_bytes()
    path.unlink()
    return content


def texts_of(*sources: Path, **options) -> list[str]:
    return [piece.text for piece in read_pieces(*sources, **options)[0]]


def problem_of(*sources: Path, **options) -> str:
    with pytest.raises(DataError) as caught:
        read_pieces(*sources, **options)
    return str(caught.value)


def compressed(content: bytes, kind: str) -> bytes:
    return gzip.compress(content) if kind == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress(content)


def bgzf(content: bytes, *, with_end: bool = True) -> bytes:
    """Compress as bgzip does: members state their size, and an empty one ends the file."""
    members = []
    for part in [content[start : start + 20_000] for start in range(0, len(content), 20_000)] + [b""] * with_end:
        deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
        data = deflate.compress(part) + deflate.flush()
        head = b"\x1f\x8b\x08\x04" + bytes(4) + b"\x00\xff\x06\x00BC\x02\x00" + struct.pack("<H", len(data) + 25)
        members.append(head + data + struct.pack("<II", zlib.crc32(part), len(part)))
    return b"".join(members)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_all_members_of_a_compressed_file_are_read(tmp_path, lines, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(compressed(lines[:1000], kind) + compressed(lines[1000:], kind))

    pieces, reader = read_pieces(path)

    assert [piece.text for piece in pieces] == TEXTS
    assert reader.disk_bytes == path.stat().st_size


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_compressed_text_is_one_document(tmp_path, kind):
    (tmp_path / f"a.txt.{kind}").write_bytes(compressed("\ufefffirst\r\nsecond".encode(), kind))

    assert texts_of(tmp_path) == ["first\r\nsecond"]


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("missing", [1, 9, 500])
def test_file_that_was_cut_short_is_damaged(tmp_path, lines, kind, missing):
    path = tmp_path / f"a.json.{kind}"
    path.write_bytes(compressed(lines, kind)[:-missing])

    problem = problem_of(path)
    pieces, reader = read_pieces(path, on_bad_record="skip")

    assert problem.startswith(f"{path}")
    assert " file is damaged: " in problem
    assert problem.endswith(ADVICE)
    assert [piece.text for piece in pieces] == TEXTS[: len(pieces)]
    assert reader.skipped_records == 1


def test_lines_before_damage_are_used(tmp_path, lines, capsys):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines) + gzip.compress(lines)[:-8])

    pieces, _ = read_pieces(path, on_bad_record="skip")

    problem = f"{path}, after line {len(pieces):,}: the gzip file is damaged: Compressed file ended before the "
    assert len(pieces) > 3000
    assert problem_of(path).startswith(problem)
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {problem}")
    assert warning.endswith("; what follows is left out\n")


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_changed_bytes_are_damage(tmp_path, lines, kind, capsys):
    whole = compressed(lines, kind)
    for name, content in {"none": b'{"text": "plain"}\n', "middle": whole[:60] + bytes(30) + whole[90:]}.items():
        (tmp_path / f"{name}.jsonl.{kind}").write_bytes(content)

        path = tmp_path / f"{name}.jsonl.{kind}"
        _, reader = read_pieces(path, on_bad_record="skip")

        # A changed byte may decompress to bad lines before the checksum fails.
        assert reader.skipped_records >= 1
        assert " file is damaged: " in problem_of(path) or (name, kind) == ("middle", "zst")
    assert " file is damaged: " in capsys.readouterr().err


def test_bgzip_file_cut_between_blocks_is_damaged(tmp_path, lines):
    (tmp_path / "whole.jsonl.gz").write_bytes(bgzf(lines))
    (tmp_path / "cut.jsonl.gz").write_bytes(bgzf(lines, with_end=False))

    assert texts_of(tmp_path / "whole.jsonl.gz") == TEXTS
    assert problem_of(tmp_path / "cut.jsonl.gz") == (
        f"{tmp_path}/cut.jsonl.gz: the gzip file is damaged: it was written by bgzip, and the last "
        f"block is missing, so it was cut short{ADVICE}"
    )


def test_byte_order_mark_and_carriage_returns_are_kept_out(tmp_path):
    content = b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two\\r\\n"}\r\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))

    assert texts_of(tmp_path) == ["one", "two\r\n"] * 2


def write_table(path: Path, texts: list, **columns) -> Path:
    arrow.parquet.write_table(arrow.table({"text": texts, **columns}), path, row_group_size=1000)
    return path


def test_table_is_read_by_its_column(tmp_path):
    path = write_table(tmp_path / "a.parquet", TEXTS, body=[text.upper() for text in TEXTS])

    pieces, reader = read_pieces(path)

    assert [piece.text for piece in pieces] == TEXTS
    assert reader.disk_bytes == path.stat().st_size
    assert texts_of(path, text_key="body") == [text.upper() for text in TEXTS]


def test_dictionary_column_of_texts_is_read(tmp_path):
    arrow.parquet.write_table(
        arrow.table({"text": arrow.array(["a", "b", "a"]).dictionary_encode()}), tmp_path / "a.parquet"
    )

    assert texts_of(tmp_path / "a.parquet") == ["a", "b", "a"]


def test_rows_without_text_are_reported(tmp_path):
    path = write_table(tmp_path / "a.parquet", [*TEXTS[:BATCH_ROWS], None, "", "last"])

    assert problem_of(path) == (
        f'{path}, row {BATCH_ROWS + 1}: the column "text" (data.text_key) holds null and not text{ADVICE}'
    )
    pieces, reader = read_pieces(path, on_bad_record="skip")
    assert [piece.text for piece in pieces] == [*TEXTS[:BATCH_ROWS], "last"]
    assert (reader.skipped_records, reader.empty_documents) == (1, 1)


def test_row_that_is_not_utf8_is_reported(tmp_path):
    binary = arrow.array([b"one", b"caf\xe9"], arrow.binary())
    text = arrow.StringArray.from_buffers(2, binary.buffers()[1], binary.buffers()[2])
    arrow.parquet.write_table(arrow.table({"text": text}), tmp_path / "a.parquet")

    assert problem_of(tmp_path / "a.parquet") == (
        f"{tmp_path}/a.parquet, row 2: not UTF-8 text (byte 4: unexpected end of data){ADVICE}"
    )


def test_table_without_texts_is_reported(tmp_path):
    path = write_table(tmp_path / "a.parquet", [1, 2], body=["a", "b"])

    assert problem_of(path) == f'{path}: the column "text" (data.text_key) holds int64 and not text{ADVICE}'
    assert problem_of(path, text_key="words") == (
        f'{path}: no column "words" (data.text_key); the columns are "text", "body"{ADVICE}'
    )


def test_damaged_table_is_reported(tmp_path):
    whole = write_table(tmp_path / "a.parquet", [text * 9 for text in TEXTS]).read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-100])
    (tmp_path / "c.parquet").write_bytes(whole[: len(whole) // 2] + bytes(200) + whole[len(whole) // 2 + 200 :])

    assert problem_of(tmp_path / "b.parquet").startswith(f"{tmp_path}/b.parquet: the parquet file is damaged: ")
    problem = problem_of(tmp_path / "c.parquet")
    assert problem.startswith(f"{tmp_path}/c.parquet, after row 896: the parquet file is damaged: ")
    assert read_pieces(tmp_path / "c.parquet", on_bad_record="skip")[1].skipped_records == 1


@pytest.mark.parametrize(("name", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_missing_package_is_reported(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"any")
    monkeypatch.setitem(sys.modules, package, None)

    assert problem_of(tmp_path / name) == (
        f'{tmp_path}/{name}: reading it needs another package: pip install "meshtrain[data]"'
    )


def test_line_too_long_for_memory_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("meshtrain.data.text.chunks.MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "a.jsonl"
    long = json.dumps({"text": "x" * (5 << 20)})
    path.write_text(f'{{"text": "one"}}\n{long}\n{{"text": "two"}}\n{long}')

    assert problem_of(path) == f"{path}, line 2: longer than 1,048,576 bytes{ADVICE}"
    pieces, reader = read_pieces(path, on_bad_record="skip")
    assert [piece.text for piece in pieces] == ["one", "two"]
    assert reader.skipped_records == 2
