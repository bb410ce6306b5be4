"""Documents: read piece by piece from every kind of file."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from meshtrain.data.text.corpus import Corpus
from meshtrain.data.text.documents import DocumentReader
from meshtrain.data.text.sources import SourceFile, find_files
from meshtrain.data.tokens.cutting import PIECE_CHARACTERS
from meshtrain.errors import DataError
from tests.data.corpora import read_pieces, write_lines

UNICODE = ["grüß dich", "日本語のテキスト", "emoji 🦜\r\nand\tlines\u2028", '"quoted" \\ back', "plain"]


def texts_of(*sources: Path | str, **options) -> list[str]:
    return [piece.text for piece in read_pieces(*sources, **options)[0]]


def problem_of(*sources: Path | str, **options) -> str:
    with pytest.raises(DataError) as caught:
        read_pieces(*sources, **options)
    return str(caught.value)


def test_json_lines_in_any_alphabet(tmp_path):
    escaped = write_lines(tmp_path / "a.jsonl", UNICODE)
    plain = tmp_path / "b.jsonl"
    plain.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in UNICODE))

    pieces, reader = read_pieces(escaped, plain)

    assert [piece.text for piece in pieces] == UNICODE * 2
    assert [piece.num_bytes for piece in pieces] == [len(text.encode()) for text in UNICODE * 2]
    assert all(piece.ends_document and not piece.is_held_out for piece in pieces)
    assert reader.disk_bytes == escaped.stat().st_size + plain.stat().st_size


def test_compressed_json_lines_in_several_members(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", UNICODE).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines) + gzip.compress(lines))

    pieces, reader = read_pieces(tmp_path / "a.jsonl.gz")

    assert [piece.text for piece in pieces] == UNICODE * 2
    assert reader.disk_bytes == (tmp_path / "a.jsonl.gz").stat().st_size


def test_text_file_is_one_unchanged_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufefffirst\r\nsecond\n\n".encode())
    (tmp_path / "b.txt").write_text("🦜")

    assert texts_of(tmp_path / "*.txt") == ["first\r\nsecond\n\n", "🦜"]


def test_text_is_read_under_another_key(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1, "body": "words", "text": 3}\n')

    assert texts_of(tmp_path / "a.jsonl", text_key="body") == ["words"]


def test_unused_number_may_have_any_length(tmp_path):
    digits = "7" * 5000
    (tmp_path / "a.jsonl").write_text(f'{{"id": {digits}, "text": "words"}}\n')
    (tmp_path / "b.jsonl").write_text(f'{{"text": {digits}}}\n')

    assert texts_of(tmp_path / "a.jsonl") == ["words"]
    assert 'the key "text" (data.text_key) holds a number and not text' in problem_of(tmp_path / "b.jsonl")


def test_blank_lines_are_ignored_and_empty_texts_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "one"}\n   \n{"text": ""}\n{"text": "two"}\n\n')

    pieces, reader = read_pieces(tmp_path / "a.jsonl")

    assert [piece.text for piece in pieces] == ["one", "two"]
    assert (reader.empty_documents, reader.skipped_records) == (1, 0)


BROKEN = {
    '{"text": "half': "not JSON (column 10: Unterminated string starting at)",
    '{"text": "a"} {': "not JSON (column 15: Extra data)",
    '["text"]': 'a list where an object with the key "text" is expected',
    "[": "only the beginning of a record, where every line must hold a complete one",
    "null": 'null where an object with the key "text" is expected',
    '"text"': 'text where an object with the key "text" is expected',
    '{"id": 1, "content": "a"}': 'no key "text" (data.text_key); the keys are "id", "content"',
    '{"text": 3.5}': 'the key "text" (data.text_key) holds a number and not text',
    '{"text": null}': 'the key "text" (data.text_key) holds null and not text',
    '{"text": true}': 'the key "text" (data.text_key) holds a boolean and not text',
    '{"text": {"a": 1}}': 'the key "text" (data.text_key) holds an object and not text',
    '{"text": "\\ud83e"}': 'the text of "text" holds half a surrogate pair, which stands for no character',
    '{"text": "a", "image": {"path": "x.png"}}': (
        'the key "image" holds an object beside the text, and meshtrain trains on text alone'
    ),
    "[" * 100_000: "maximum recursion depth exceeded",
}


@pytest.mark.parametrize("line", BROKEN, ids=[line[:20] for line in BROKEN])
def test_bad_line_is_reported_with_its_number_or_skipped(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "one"}}\n{line}\n{{"text": "two"}}\n')

    problem = problem_of(path)
    pieces, reader = read_pieces(path, on_bad_record="skip")

    assert problem.startswith(f"{path}, line 2: {BROKEN[line]}")
    assert problem.endswith('; fix it, or leave such records out with data.on_bad_record = "skip"')
    assert [piece.text for piece in pieces] == ["one", "two"]
    assert reader.skipped_records == 1


def test_first_skipped_records_are_shown(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text("1\n2\n3\n4\n5\n")

    read_pieces(path, on_bad_record="skip")

    reason = 'a number where an object with the key "text" is expected; left out'
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {path}, line 1: {reason}",
        f"warning: {path}, line 2: {reason}",
        f"warning: {path}, line 3: {reason}; more are only counted",
    ]


def test_bytes_that_are_not_utf8_are_reported(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "one"}\n')
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")

    assert problem_of(tmp_path / "a.jsonl").startswith(
        f"{tmp_path}/a.jsonl, line 1: not UTF-8 text (byte 14: invalid continuation byte)"
    )
    assert problem_of(tmp_path / "b.txt").startswith(
        f"{tmp_path}/b.txt: not UTF-8 text (byte 4: unexpected end of data)"
    )
    pieces, reader = read_pieces(tmp_path / "*", on_bad_record="skip")
    assert [piece.text for piece in pieces] == ["one"]
    assert reader.skipped_records == 2


def test_python_files_that_are_not_utf8_are_left_out(tmp_path):
    contents = {"a.py": b"x = 1\n", "latin.py": b"# caf\xe9\n", "z.py": b"y = 2\n"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = tuple(SourceFile(tmp_path / name, "python", 6, 0) for name in contents)

    reader = DocumentReader(Corpus(files, ()))

    assert [piece.text for piece in reader] == ["x = 1\n", "y = 2\n"]
    assert reader.skipped_records == 0


def test_file_deleted_before_it_is_read_is_reported(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["one"])
    reader = DocumentReader(Corpus(tuple(find_files([str(path)], key="data.train")), ()))
    path.unlink()

    with pytest.raises(DataError, match=f"cannot read {path}: No such file or directory; fix it or leave it out"):
        list(reader)


def test_long_document_is_cut_at_line_ends(tmp_path):
    text = "".join(f"line {number} of a long text\n" for number in range(90_000))
    (tmp_path / "a.txt").write_text(text)
    write_lines(tmp_path / "b.jsonl", [text, "short"])

    pieces, reader = read_pieces(tmp_path / "a.txt", tmp_path / "b.jsonl")

    assert "".join(piece.text for piece in pieces) == text + text + "short"
    assert [piece.ends_document for piece in pieces] == [False, False, True, False, False, True, True]
    assert all(piece.text.endswith("\n") for piece in pieces[:-1])
    assert reader.disk_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_memory_does_not_grow_with_the_file(tmp_path):
    (tmp_path / "a.txt").write_text(("x" * 99 + "\n") * 300_000)
    reader = DocumentReader(Corpus(tuple(find_files([f"{tmp_path}/a.txt"], key="data.train")), ()))

    tracemalloc.start()
    characters = sum(len(piece.text) for piece in reader)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert characters == 30_000_000
    assert most < 10 * PIECE_CHARACTERS


def test_held_out_documents_do_not_depend_on_the_reader(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [f"document {number}" for number in range(2000)])

    held_out = [piece.is_held_out for piece in read_pieces(path, held_out=0.1)[0]]
    more = [piece.is_held_out for piece in read_pieces(path, path, held_out=0.1)[0]]

    assert 150 < sum(held_out) < 250
    assert more[:2000] == held_out
    assert held_out[0]
    assert not any(piece.is_held_out for piece in read_pieces(path)[0])


def test_identity_of_a_corpus_depends_on_content_and_not_on_paths(tmp_path):
    files = [SourceFile(Path(name), "txt", 1, 1) for name in ("/a.txt", "/elsewhere/b.txt")]
    corpora = [
        Corpus((files[0],), ("hash",)),
        Corpus((files[1],), ("hash",)),
        Corpus((files[0],), ("other",)),
        Corpus((files[0],), ("hash",), text_key="body"),
        Corpus((files[0],), ("hash",), on_bad_record="skip"),
        Corpus((files[0],), ("hash",), held_out=0.1),
        Corpus((SourceFile(Path("/a.txt"), "jsonl", 1, 1),), ("hash",)),
    ]

    assert corpora[0].identity == corpora[1].identity
    assert len({corpus.identity for corpus in corpora}) == len(corpora) - 1
