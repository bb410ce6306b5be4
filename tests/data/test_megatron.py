"""Megatron-LM pairs: they are read and written, and refused if the files do not match."""

import math
import struct
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from meshtrain.data.cache import Cache
from meshtrain.data.tokens.megatron import megatron_token_type, write_megatron_index
from meshtrain.data.tokens.token_file import TokenFile
from meshtrain.data.tokens.tokenized_source import is_tokenized, open_token_file
from meshtrain.data.tokens.tokenizer import TokenizerFiles, find_tokenizer
from meshtrain.errors import DataError
from tests.data.corpora import token_file

END = 9
DOCUMENTS = [[[1, 2, 3, END]], [[4, END]], [[5, 6], [7, 8, END]], [[]], [[1, END]]]
"""Tokens of each sequence."""


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def tokenizer(tmp_path, cache) -> TokenizerFiles:
    """Return a tokenizer of ten tokens, of which the last is the end token."""
    words = {f"w{number}": number for number in range(END)} | {"</s>": END}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    return find_tokenizer(str(tmp_path / "tokenizer.json"), cache)


def write_pair(prefix: Path, documents: list[list[list[int]]] = DOCUMENTS, kind: str = "u2", code: int = 8) -> Path:
    """Write a pair byte by byte, as the format defines it."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = np.array([token for sequence in sequences for token in sequence], kind)
    lengths = [len(sequence) for sequence in sequences]
    pointers = [start * tokens.itemsize for start in accumulate(lengths, initial=0)][:-1]
    borders = list(accumulate(map(len, documents), initial=0))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(borders))
    arrays = np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(borders, "<i8")
    prefix.with_name(f"{prefix.name}.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    prefix.with_name(f"{prefix.name}.bin").write_bytes(tokens.tobytes())
    return prefix


def change(path: Path, place: int, content: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(place)
        stream.write(content)


def documents_of(file: TokenFile) -> list[list[int]]:
    return [file.tokens[start:end].tolist() for start, end in pairwise(file.offsets.tolist())]


@pytest.mark.parametrize(("kind", "code"), [("u1", 1), ("i1", 2), ("i2", 3), ("i4", 4), ("i8", 5), ("u2", 8)])
def test_pair_of_any_token_type_is_a_token_file(tmp_path, tokenizer, cache, kind, code):
    prefix = write_pair(tmp_path / "corpus.en", kind=kind, code=code)

    files = [open_token_file(f"{prefix}{ending}", tokenizer, cache) for ending in ("", ".bin", ".idx")]

    whole = [[token for sequence in document for token in sequence] for document in DOCUMENTS]
    for file in files:
        assert documents_of(file) == [document for document in whole if document]
        assert isinstance(file.tokens, np.memmap)
        assert file.directory == prefix
        assert (file.counts.documents, file.counts.ended_documents, file.counts.empty_documents) == (4, 4, 1)
        assert (file.counts.tokens, file.counts.tokenizer) == (13, tokenizer.identity)
    assert len({file.identity for file in files}) == 1


def test_tokenized_sources_are_recognized(tmp_path):
    write_pair(tmp_path / "pair")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty").mkdir()

    names = ("pair", "pair.bin", "pair.idx", "text.txt", "empty", "none")

    assert [name for name in names if is_tokenized(f"{tmp_path}/{name}")] == ["pair", "pair.bin", "pair.idx"]


def test_pair_is_scanned_once(tmp_path, tokenizer, cache):
    prefix = write_pair(tmp_path / "pair")
    first = open_token_file(str(prefix), tokenizer, cache)
    (made,) = (cache.directory / "megatron").glob("*/counts.json")
    before = made.stat().st_mtime_ns

    again = open_token_file(str(prefix), tokenizer, cache)

    entropy = -sum(count / 13 * math.log(count / 13) for count in (2, 4, *[1] * 7))
    assert again.counts == first.counts
    assert made.stat().st_mtime_ns == before
    assert first.counts.unigram_entropy_nats == pytest.approx(entropy)


def test_documents_without_an_end_token_are_counted(tmp_path, tokenizer, cache):
    prefix = write_pair(tmp_path / "pair", [[[1, 2]], [[3, END]], [[4]]])

    assert open_token_file(str(prefix), tokenizer, cache).counts.ended_documents == 1


SEQUENCES = sum(map(len, DOCUMENTS))
POINTERS = 34 + 4 * SEQUENCES
BORDERS = POINTERS + 8 * SEQUENCES
CHANGED = {
    "the magic": (0, b"GARBAGE", "byte 0: b'GARBAGE\\x00\\x00' where an index begins with b'MMIDIDX\\x00\\x00'"),
    "the version": (9, b"\x02", "byte 9: version 2 of the index, and only version 1 is supported"),
    "a float type": (17, b"\x07", "byte 17: the type 7 of its tokens is float32"),
    "an unknown type": (17, b"\x63", "byte 17: the type 99 of its tokens is unknown"),
    "a negative length": (34, struct.pack("<i", -1), "byte 34: sequence 0 has -1 tokens"),
    "a pointer": (
        POINTERS + 8,
        struct.pack("<q", 6),
        "byte 66: sequence 1 starts at byte 6 of the .bin file and not at 8",
    ),
    "the first border": (BORDERS, struct.pack("<q", 1), "byte 106: the first document does not start with sequence 0"),
    "a border": (BORDERS + 8, struct.pack("<q", 5), "byte 122: document 1 ends before it starts"),
    "the last border": (BORDERS + 40, struct.pack("<q", 8), "byte 146: the last document ends with sequence 8 of 6"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_wrong_index_is_reported(tmp_path, tokenizer, cache, what):
    prefix = write_pair(tmp_path / "pair")
    place, content, problem = CHANGED[what]
    change(tmp_path / "pair.idx", place, content)

    with pytest.raises(DataError) as caught:
        open_token_file(str(prefix), tokenizer, cache)

    assert str(caught.value) == f"{prefix}.idx, {problem}; copy both files again, or write them again"


def problem_of(prefix: Path, tokenizer: TokenizerFiles, cache: Cache) -> str:
    with pytest.raises(DataError) as caught:
        open_token_file(str(prefix), tokenizer, cache)
    return str(caught.value)


def test_pair_of_unequal_sizes_is_reported(tmp_path, tokenizer, cache):
    prefix = write_pair(tmp_path / "pair")
    whole = (tmp_path / "pair.idx").read_bytes(), (tmp_path / "pair.bin").read_bytes()
    mend = "copy both files again, or write them again"
    cases = {
        (whole[0][:20], whole[1]): f"{prefix}.idx ends after 20 bytes, within its header; {mend}",
        (whole[0][:-1], whole[1]): (
            f"{prefix}.idx holds 153 bytes where its header, with 6 sequences and 5 documents, says 154; {mend}"
        ),
        (whole[0] + bytes(6), whole[1]): (
            f"{prefix}.idx is of a multimodal corpus (with images, for example), which is not supported; name another"
        ),
        (whole[0], whole[1][:-2]): (
            f"{prefix}.bin holds 24 bytes where {prefix}.idx says 26: it was cut short; "
            "copy it again, or tokenize again"
        ),
        (whole[0], whole[1] * 2): (
            f"{prefix}.bin holds 52 bytes where {prefix}.idx says 26: it belongs to something else; "
            "copy it again, or tokenize again"
        ),
    }
    for (index, tokens), problem in cases.items():
        (tmp_path / "pair.idx").write_bytes(index)
        (tmp_path / "pair.bin").write_bytes(tokens)

        assert problem_of(prefix, tokenizer, cache) == problem

    (tmp_path / "pair.idx").unlink()
    assert problem_of(tmp_path / "pair.bin", tokenizer, cache) == (
        f"{prefix}.idx is missing, and without it {prefix}.bin cannot be read; {mend}"
    )


def test_pair_without_tokens_is_refused(tmp_path, tokenizer, cache):
    prefix = write_pair(tmp_path / "pair", [])

    assert problem_of(prefix, tokenizer, cache) == f"{prefix}.bin holds no tokens; leave it out"


@pytest.mark.parametrize("token", [10, -1])
def test_token_outside_the_vocabulary_is_reported(tmp_path, tokenizer, cache, token):
    prefix = write_pair(tmp_path / "pair", [[[1, 2, END]], [[3, token, END]]], kind="i4", code=4)

    for _ in range(2):
        assert problem_of(prefix, tokenizer, cache) == (
            f"{prefix}.bin: token 4 (byte 16) is {token}, and the tokenizer has 0 to 9; "
            "name the tokenizer that it was written with as data.tokenizer.path, or tokenize again"
        )


@pytest.mark.parametrize("vocab_size", [10, 70_000])
def test_written_pair_is_read_back(tmp_path, tokenizer, cache, vocab_size):
    kind = np.dtype(megatron_token_type(vocab_size))
    tokens, offsets = np.array([1, 2, END, 3, END, END], kind), np.array([0, 3, 5, 6])
    (tmp_path / "pair.bin").write_bytes(tokens.tobytes())

    write_megatron_index(tmp_path / "pair.idx", offsets, kind)

    file = open_token_file(f"{tmp_path}/pair", tokenizer, cache)
    assert documents_of(file) == [[1, 2, END], [3, END], [END]]
    by_hand = write_pair(
        tmp_path / "hand", [[[1, 2, END]], [[3, END]], [[END]]], kind.str, 8 if kind == np.uint16 else 4
    )
    assert (tmp_path / "pair.idx").read_bytes() == by_hand.with_suffix(".idx").read_bytes()


def test_document_too_long_for_an_index_is_reported(tmp_path):
    with pytest.raises(DataError) as caught:
        write_megatron_index(tmp_path / "pair.idx", np.array([0, 5, 5 + (1 << 31)]), np.dtype(np.uint16))

    assert str(caught.value) == (
        "document 1 has 2,147,483,648 tokens, more than pair.idx can hold; "
        "cut it into several, or take --format meshtrain"
    )


def test_a_token_file_is_opened_and_checked(tmp_path, tokenizer, cache):
    file, made_with = token_file(tmp_path / "made", ["one", "two"])

    opened = open_token_file(str(file.directory), made_with, cache)

    assert documents_of(opened) == documents_of(file)
    assert opened.identity == file.identity
    problem = problem_of(file.directory, tokenizer, cache)
    assert problem.startswith(
        f"{file.directory} was tokenized with another tokenizer (identity {made_with.identity[:12]}"
    )
    assert problem.endswith("name the tokenizer it was made with as data.tokenizer.path, or tokenize again")


def test_damaged_token_file_is_reported(tmp_path, cache):
    file, made_with = token_file(tmp_path / "made", ["one", "two"])
    tokens = file.directory / "tokens.bin"
    whole = tokens.read_bytes()

    tokens.write_bytes(whole[:-2])
    assert problem_of(file.directory, made_with, cache) == (
        f"{tokens} holds 14 bytes where counts.json says 16: it was cut short; copy it again, or tokenize again"
    )
    tokens.write_bytes(b"\x05\x00" + whole[2:])
    assert problem_of(file.directory, made_with, cache).startswith(
        f"{tokens} is damaged: its content is not what counts.json says (xxh3 "
    )
    tokens.unlink()
    assert problem_of(file.directory, made_with, cache) == f"{tokens} is missing; copy it again, or tokenize again"
    counts = file.directory / "counts.json"
    counts.write_text('{"documents": 2}')
    assert problem_of(file.directory, made_with, cache) == (
        f"{counts} is not of the format 3 that this version reads; tokenize again with meshtrain tokenize"
    )
    counts.write_text("{")
    assert problem_of(file.directory, made_with, cache).startswith(f"{counts} cannot be read (Expecting ")


def test_directory_of_several_token_files_is_refused(tmp_path, tokenizer, cache):
    (tmp_path / "all").mkdir()
    write_pair(tmp_path / "all" / "train")

    assert is_tokenized(f"{tmp_path}/all")
    assert problem_of(tmp_path / "all", tokenizer, cache) == (
        f'{tmp_path}/all holds several token files; name one of them, such as "{tmp_path}/all/train"'
    )
