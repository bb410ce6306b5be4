"""Records of every kind of source file, and records that are wrong."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from meshtrain.corpus.steps.records import BadCorpusRecord, read_records, read_text_lines
from meshtrain.data.text.sources import SourceFile
from meshtrain.errors import DataError

LINES = (
    b'{"text": "one", "url": "http://a.example/", "n": 1}\n\n{"id": "mine", "text": "two"}\n{"id": 7, "text": "3"}\n'
)


def records(path, kind, text_key="text"):
    return list(read_records(SourceFile(path, kind, 1, 0), path.name, text_key))


def simple(found):
    return [(document.id, document.text, document.metadata) for document in found]


@pytest.mark.parametrize(
    ("kind", "pack"), [("jsonl", bytes), ("jsonl.gz", gzip.compress), ("jsonl.zst", zstandard.compress)]
)
def test_json_lines_keep_their_keys_and_get_their_line_as_id(tmp_path, kind, pack):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(pack(LINES))

    assert simple(records(path, kind)) == [
        (f"a.{kind}:1", "one", {"url": "http://a.example/", "n": 1}),
        ("mine", "two", {}),
        ("7", "3", {}),
    ]


def test_rows_of_a_parquet_file_become_documents(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"text": f"text {number}", "n": number} for number in range(2500)] + [{"text": None, "n": 1}]
    pq.write_table(pa.Table.from_pylist(rows), path)

    *found, bad = records(path, "parquet")

    assert simple(found) == [(f"a.parquet:{number + 1}", f"text {number}", {"n": number}) for number in range(2500)]
    assert bad == BadCorpusRecord(
        f"{path}, row 2501", "broken record", 'the key "text" (text_key) holds null instead of text', ""
    )


def test_a_binary_column_of_a_parquet_file_is_not_text(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([b"one"], pa.binary()), "n": [1]}), path)

    assert records(path, "parquet") == [
        BadCorpusRecord(f"{path}, row 1", "broken record", 'the key "text" (text_key) holds bytes instead of text', "")
    ]


def test_a_parquet_row_that_is_not_utf8_does_not_affect_other_rows(tmp_path):
    path = tmp_path / "a.parquet"
    ends = b"".join(end.to_bytes(4, "little") for end in (0, 3, 8, 11))
    texts = pa.StringArray.from_buffers(3, pa.py_buffer(ends), pa.py_buffer(b"onecaf\xe9 two"))
    pq.write_table(pa.table({"text": texts}), path)

    one, bad, two = records(path, "parquet")

    assert [one.text, two.text] == ["one", "two"]
    assert bad == BadCorpusRecord(
        f"{path}, row 2", "broken record", "not UTF-8 text (byte 4: invalid continuation byte)", ""
    )


@pytest.mark.parametrize(("kind", "pack"), [("txt", bytes), ("python", bytes), ("txt.gz", gzip.compress)])
def test_a_text_file_is_one_document(tmp_path, kind, pack):
    path = tmp_path / "a.txt"
    path.write_bytes(pack("\ufefffirst\r\nsecond\n".encode()))

    assert simple(records(path, kind)) == [("a.txt", "first\r\nsecond\n", {})]


BROKEN = {
    b'{"text": "half': "not JSON (column 15: Invalid control character at)",
    b'["text"]': '["text"] where an object is expected',
    b'{"id": 1, "content": "a"}': 'no key "text" (text_key); the keys are "id", "content"',
    b'{"text": 3.5}': 'the key "text" (text_key) holds 3.5 instead of text',
    b'{"text": "\\ud83e"}': "it holds an unpaired surrogate, which is not a character",
    b'{"text": "a", "title": "\\ud83e"}': "it holds an unpaired surrogate, which is not a character",
    b'{"text": "caf\xe9"}': "not UTF-8 text (byte 14: invalid continuation byte)",
    b"[" * 100_000: "maximum recursion depth exceeded",
}


@pytest.mark.parametrize("line", BROKEN, ids=[repr(line[:20]) for line in BROKEN])
def test_a_broken_line_is_returned_with_its_location(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')

    one, bad, two = records(path, "jsonl")

    assert [one.text, two.text] == ["one", "two"]
    assert bad.where == f"{path}, line 2"
    assert bad.detail.startswith(BROKEN[line])
    assert bad.text == line[:1000].decode("utf-8", "backslashreplace") + ("\n" if len(line) < 1000 else "")


def test_a_text_file_that_is_not_utf8_is_a_bad_record(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 au lait")

    (bad,) = records(path, "txt")

    assert bad == (f"{path}", "not UTF-8 text", "byte 4: invalid continuation byte", "caf\\xe9 au lait")


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "txt.gz", "parquet"])
def test_a_truncated_file_ends_with_a_bad_record(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    lines = "".join(json.dumps({"text": f"{number} " * 50}) + "\n" for number in range(3000)).encode()
    pack = {"gz": gzip.compress, "zst": zstandard.compress, "parquet": lambda content: b"PAR1" + content}
    packed = pack[kind.rpartition(".")[2]](lines)
    path.write_bytes(packed[: len(packed) * 2 // 3])

    *found, bad = records(path, kind)

    assert isinstance(bad, BadCorpusRecord)
    assert bad.reason == "damaged file"
    assert bad.where.startswith(str(path))
    assert bad.where == str(path) or bad.where.endswith(f" {len(found)}")


def test_a_missing_source_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*a.jsonl: No such file or directory"):
        records(tmp_path / "a.jsonl", "jsonl")
    with pytest.raises(DataError, match=r"cannot read .*a.txt: No such file or directory"):
        list(read_text_lines(SourceFile(tmp_path / "a.txt", "txt", 1, 0)))


def test_a_damaged_list_of_links_is_an_error(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"http://a.example\n" * 1000)[:-10])

    with pytest.raises(DataError, match=r"cannot read .*a.txt.gz: the gzip file is damaged: .*; write it again"):
        list(read_text_lines(SourceFile(tmp_path / "a.txt.gz", "txt.gz", 1, 0)))
