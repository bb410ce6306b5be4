"""The token file: every form of a corpus gives the same one, and a kill leaves no wrong one."""

import gzip
import json
import math
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import Whitespace

from meshtrain.data.cache import Cache
from meshtrain.data.tokens import tokenizing, workers
from meshtrain.data.tokens.token_file import TRAIN, VALIDATION, TokenFile
from meshtrain.data.tokens.tokenizer import find_tokenizer
from meshtrain.data.tokens.tokenizing import prepare_token_files
from meshtrain.errors import DataError
from tests.data.corpora import byte_tokenizer, expected_tokens, open_corpus, random_texts, read_pieces, write_lines

# A fork would inherit broken threads of tokenizers.
context = multiprocessing.get_context("spawn")


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


def tokenize(*sources: Path | str, cache: Cache, **options) -> dict[str, TokenFile]:
    corpus = open_corpus(*sources, cache=cache, **options)
    return prepare_token_files(corpus, byte_tokenizer(cache), cache, description="Tokenizing")[0]


def problem_of(*sources: Path | str, cache: Cache, **options) -> str:
    with pytest.raises(DataError) as caught:
        tokenize(*sources, cache=cache, **options)
    return str(caught.value)


def documents_of(file: TokenFile) -> list[list[int]]:
    offsets = file.offsets.tolist()
    return [file.tokens[start:end].tolist() for start, end in pairwise(offsets)]


def test_every_document_is_followed_by_the_end_token(tmp_path, cache):
    texts = [*random_texts(random.Random(0), 50), "grüß 日本語 🦜", " ", "\n\n"]
    file = tokenize(write_lines(tmp_path / "a.jsonl", texts), cache=cache)[TRAIN]

    assert documents_of(file) == expected_tokens(texts, byte_tokenizer(cache))
    assert file.tokens.dtype == np.uint16
    assert file.offsets.dtype == np.int64
    assert isinstance(file.tokens, np.memmap)


def test_the_counts_are_those_of_the_text(tmp_path, cache):
    texts = ["aab", "b"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in [*texts, ""]) + "broken\n")
    tokenizer = byte_tokenizer(cache)

    counts = tokenize(path, cache=cache, on_bad_record="skip")[TRAIN].counts

    assert (counts.documents, counts.tokens, counts.text_bytes) == (2, 6, 4)
    assert (counts.skipped_records, counts.empty_documents) == (1, 1)
    assert (counts.tokenizer, counts.vocab_size) == (tokenizer.identity, tokenizer.vocab_size)
    frequencies = Counter(chain.from_iterable(expected_tokens(texts, tokenizer)))
    assert sorted(frequencies.values()) == [2, 2, 2]
    assert counts.unigram_entropy_nats == pytest.approx(math.log(3))


def test_every_form_of_the_same_text_gives_the_same_tokens(tmp_path, cache):
    texts = random_texts(random.Random(0), 20)
    lines = write_lines(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    (tmp_path / "c").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / f"c/{number:02}.txt").write_text(text)

    forms = [tokenize(source, cache=cache)[TRAIN] for source in (lines, tmp_path / "b.jsonl.gz", tmp_path / "c/*.txt")]

    assert documents_of(forms[0]) == documents_of(forms[1]) == documents_of(forms[2])


def test_many_batches_and_a_document_longer_than_a_batch(tmp_path, cache):
    long = "".join(f"line {number}\n" for number in range(120_000))
    texts = ["first", long, *[f"short {number}" * 300 for number in range(300)], long[:-5], "last"]

    file = tokenize(write_lines(tmp_path / "a.jsonl", texts), cache=cache)[TRAIN]

    assert file.counts.documents == len(texts)
    lengths = np.diff(file.offsets).tolist()
    assert lengths == [len(text) + 1 for text in texts]
    decoded = byte_tokenizer(cache).load().decode(documents_of(file)[1])
    assert decoded == long


def test_documents_without_a_token_are_left_out_and_counted(tmp_path, cache):
    tokenizer = Tokenizer(WordLevel({"word": 0, "</s>": 1}, unk_token="word"))
    tokenizer.normalizer = Replace("void", "")
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus = open_corpus(write_lines(tmp_path / "a.jsonl", ["void", "word word", "void void", "word"]), cache=cache)
    files = find_tokenizer(str(tmp_path / "tokenizer.json"), cache)

    parts, _ = prepare_token_files(corpus, files, cache, description="Tokenizing")

    assert documents_of(parts[TRAIN]) == [[0, 0, 1], [0, 1]]
    assert parts[TRAIN].counts.empty_documents == 2


def test_a_large_vocabulary_takes_four_bytes(tmp_path, cache):
    words = {f"w{number}": number for number in range(65_536)} | {"</s>": 65_536}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus = open_corpus(write_lines(tmp_path / "a.jsonl", ["w65535 w1"]), cache=cache)

    parts, _ = prepare_token_files(
        corpus, find_tokenizer(str(tmp_path / "tokenizer.json"), cache), cache, description="Tokenizing"
    )

    assert parts[TRAIN].tokens.dtype == np.uint32
    assert documents_of(parts[TRAIN]) == [[65_535, 1, 65_536]]


def test_part_of_the_documents_is_held_out(tmp_path, cache):
    texts = [f"document {number}" for number in range(500)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    held_out = [piece.is_held_out for piece in read_pieces(path, held_out=0.1)[0]]
    documents = expected_tokens(texts, byte_tokenizer(cache))

    parts = tokenize(path, cache=cache, held_out=0.1)

    kept = [document for document, held in zip(documents, held_out, strict=True) if held]
    trained = [document for document, held in zip(documents, held_out, strict=True) if not held]
    assert documents_of(parts[VALIDATION]) == kept
    assert documents_of(parts[TRAIN]) == trained
    assert parts[VALIDATION].counts.documents + parts[TRAIN].counts.documents == 500


def test_text_is_tokenized_once_per_tokenizer(tmp_path, cache):
    path = write_lines(tmp_path / "a.jsonl", ["one", "two"])
    corpus = open_corpus(path, cache=cache)
    answers = [prepare_token_files(corpus, byte_tokenizer(cache), cache, description="T") for _ in range(2)]

    assert [built for _, built in answers] == [True, False]
    moved = path.rename(tmp_path / "b.jsonl")
    corpus = open_corpus(moved, cache=cache)
    assert not prepare_token_files(corpus, byte_tokenizer(cache), cache, description="T")[1]
    write_lines(moved, ["one", "other"])
    corpus = open_corpus(moved, cache=cache)
    assert prepare_token_files(corpus, byte_tokenizer(cache), cache, description="T")[1]


def test_truncated_token_file_is_built_again(tmp_path, cache):
    path = write_lines(tmp_path / "a.jsonl", ["one", "two"])
    before = documents_of(file := tokenize(path, cache=cache)[TRAIN])
    for name in ("tokens.bin", "documents.bin"):
        os.truncate(file.directory / name, 2)

        assert documents_of(tokenize(path, cache=cache)[TRAIN]) == before
    (file.directory / "tokens.bin").unlink()
    assert documents_of(tokenize(path, cache=cache)[TRAIN]) == before
    (file.directory / "counts.json").unlink()
    assert documents_of(tokenize(path, cache=cache)[TRAIN]) == before


def test_text_without_documents_is_reported(tmp_path, cache):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"id": 1}\n')

    assert problem_of(path, cache=cache, on_bad_record="skip") == (
        f"{path}: no text found, but 1 empty documents and 1 skipped records; "
        'check the files and data.text_key, which is "text"'
    )


def test_one_document_cannot_be_split(tmp_path, cache):
    paths = [write_lines(tmp_path / "a.jsonl", ["only one"]), tmp_path / "b.jsonl"]
    paths[1].write_text('{"text": ""}\n')

    assert problem_of(*paths, cache=cache, held_out=0.5) == (
        f"{paths[0]} and the files after it: 1 documents cannot be split by data.validation = 0.5; "
        "set data.validation to files of its own, or to 0"
    )


def test_two_documents_can_be_split(tmp_path, cache):
    parts = tokenize(write_lines(tmp_path / "a.jsonl", ["one", "two"]), cache=cache, held_out=0.01)

    assert [parts[part].counts.documents for part in (TRAIN, VALIDATION)] == [1, 1]


def test_bad_line_leaves_no_token_file(tmp_path, cache):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' * 100 + "broken\n")

    assert problem_of(path, cache=cache).startswith(f"{path}, line 101: not JSON (column 1: Expecting value); fix it")
    assert not [entry for entry in (cache.directory / "tokens").iterdir() if entry.is_dir()]


def test_file_that_changes_while_it_is_read_is_reported(tmp_path, cache):
    path = write_lines(tmp_path / "a.jsonl", ["one"])
    corpus = open_corpus(path, cache=cache)
    with path.open("a") as stream:
        stream.write('{"text": "two"}\n')

    for _ in range(2):
        with pytest.raises(DataError) as caught:
            prepare_token_files(corpus, byte_tokenizer(cache), cache, description="Tokenizing")

        assert str(caught.value) == f"{path} changed while it was read; start again when no other process writes to it"
    assert tokenize(path, cache=cache)[TRAIN].counts.documents == 2


def tokenize_elsewhere(source: Path, cache: Cache) -> None:
    # Many blocks leave enough time to kill this process in the middle of its work.
    workers.BLOCK_BYTES = tokenizing.BLOCK_BYTES = 1 << 15
    tokenize(source, cache=cache)


def test_killed_run_leaves_no_incomplete_token_file(tmp_path, cache):
    source = write_lines(tmp_path / "a.jsonl", ["some words " * 1000 + f"{number}" for number in range(300)])
    expected = tokenize(source, cache=Cache(tmp_path / "undisturbed"))[TRAIN]
    process = context.Process(target=tokenize_elsewhere, args=(source, cache))
    process.start()
    give_up = time.monotonic() + 60
    while not any(path.stat().st_size for path in cache.directory.glob("tokens/*.partial/train/tokens.bin")):
        assert time.monotonic() < give_up
        time.sleep(0.002)

    os.kill(process.pid, signal.SIGKILL)
    process.join()

    half = next(cache.directory.glob("tokens/*.partial/train/tokens.bin")).stat().st_size
    assert half < 2 * expected.counts.tokens
    assert [path.parent.suffix for path in cache.directory.glob("tokens/*/train")] == [".partial"]
    file = tokenize(source, cache=cache)[TRAIN]
    assert np.array_equal(file.tokens, expected.tokens)
    assert np.array_equal(file.offsets, expected.offsets)
    assert not list(cache.directory.glob("tokens/*.partial"))


def test_token_file_describes_itself(tmp_path, cache):
    file = tokenize(write_lines(tmp_path / "a.jsonl", ["one"]), cache=cache)[TRAIN]

    written = json.loads((file.directory / "counts.json").read_text())

    assert written["meshtrain"]
    assert TokenFile.open(file.directory).counts == file.counts
