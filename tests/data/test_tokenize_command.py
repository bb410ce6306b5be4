"""`meshtrain tokenize` and `meshtrain tokenizer train`: the files and the messages."""

import json
import os
import socket
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from meshtrain.data.cache import Cache
from meshtrain.data.tokens import tokenize_command, tokenizing, workers
from meshtrain.data.tokens.tokenize_command import TokenizeRequest, tokenize_sources
from meshtrain.data.tokens.tokenized_source import open_token_file
from meshtrain.data.tokens.tokenizer import TokenizerFiles, find_tokenizer
from meshtrain.data.tokens.tokenizer_training import train_tokenizer_on_sources
from meshtrain.errors import DataError
from tests.data.corpora import byte_tokenizer, expected_tokens, write_lines

TEXTS = [f"document {number}\n" for number in range(200)]


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def tokenizer(cache) -> TokenizerFiles:
    return byte_tokenizer(cache)


@pytest.fixture
def source(tmp_path) -> Path:
    return write_lines(tmp_path / "texts.jsonl", TEXTS)


@pytest.fixture
def order(tmp_path, source, tokenizer):
    def make(**options) -> TokenizeRequest:
        defaults = {"sources": [str(source)], "tokenizer": str(tokenizer.directory), "output": tmp_path / "out"}
        return TokenizeRequest(**(defaults | options))

    return make


def problem_of(order: TokenizeRequest, cache: Cache) -> str:
    with pytest.raises(DataError) as caught:
        tokenize_sources(order, cache)
    return str(caught.value)


def documents_of(place: Path, tokenizer: TokenizerFiles, cache: Cache) -> list[list[int]]:
    file = open_token_file(str(place), tokenizer, cache)
    return [file.tokens[start:end].tolist() for start, end in pairwise(file.offsets.tolist())]


@pytest.mark.parametrize("kind", ["meshtrain", "megatron"])
def test_training_opens_what_is_written(order, cache, tokenizer, tmp_path, capsys, kind):
    tokenize_sources(order(format=kind), cache)

    assert documents_of(tmp_path / "out/train", tokenizer, cache) == expected_tokens(TEXTS, tokenizer)
    parts = {"meshtrain": {"train"}, "megatron": {"train.bin", "train.idx"}}[kind]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokenizer", "tokenize.json"} | parts
    beside = find_tokenizer(f"{tmp_path}/out/tokenizer", cache)
    assert beside.identity == tokenizer.identity
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    tokens = sum(len(text) + 1 for text in TEXTS)
    assert ["train", "200", f"{tokens:,}", "0.0", "MB", "0.93"] in [line.split() for line in shown]
    assert shown[-3:] == [
        "To train on it:",
        f'data.train = ["{tmp_path}/out/train"]',
        f'data.tokenizer.path = "{tmp_path}/out/tokenizer"',
    ]


@pytest.mark.parametrize("kind", ["meshtrain", "megatron"])
def test_another_tokenizer_is_refused(order, cache, tokenizer, tmp_path, kind):
    tokenize_sources(order(format=kind), cache)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    content = json.loads((tokenizer.directory / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (mixed / "tokenizer.json").write_text(json.dumps(content))
    (mixed / "tokenizer_config.json").write_bytes((tokenizer.directory / "tokenizer_config.json").read_bytes())

    with pytest.raises(DataError, match=r"out/train was tokenized with another tokenizer \(identity \w{12}\) than "):
        open_token_file(str(tmp_path / "out/train"), find_tokenizer(str(mixed), cache), cache)


def test_a_large_vocabulary_is_int32_for_megatron(order, cache, tmp_path, monkeypatch):
    tokenize_sources(order(output=tmp_path / "small", format="megatron"), cache)
    monkeypatch.setattr("meshtrain.data.tokens.tokenize_command.megatron_token_type", lambda _: np.int32)
    tokenize_sources(order(output=tmp_path / "large", format="megatron"), cache)

    small, large = ((tmp_path / name / "train.bin").read_bytes() for name in ("small", "large"))
    assert np.array_equal(np.frombuffer(small, np.uint16), np.frombuffer(large, np.int32))
    assert (tmp_path / "large/train.idx").read_bytes()[17] == 4


def test_record_describes_how_the_output_was_made(order, source, cache, tmp_path):
    tokenize_sources(order(validation=0.1, num_documents=150), cache)

    record = json.loads((tmp_path / "out/tokenize.json").read_text())
    assert record["sources"] == [{"path": str(source), "bytes": source.stat().st_size}]
    assert sum(counts["documents"] for counts in record["parts"].values()) == 150
    assert set(record["parts"]) == {"train", "validation"}


def test_same_output_is_kept_and_another_is_refused(order, source, cache, tmp_path, capsys):
    tokenize_sources(order(), cache)
    capsys.readouterr()

    tokenize_sources(order(), cache)

    assert capsys.readouterr().out == f"{tmp_path}/out already holds these token files; nothing was done\n"
    refusal = (
        f"--output: {tmp_path}/out exists already, but does not hold the token files of this command; "
        "remove it, or choose another directory"
    )
    assert problem_of(order(format="megatron"), cache) == refusal
    source.write_text('{"text": "other"}\n')
    assert problem_of(order(), cache) == refusal
    assert problem_of(order(output=tmp_path), cache).startswith(f"--output: {tmp_path} exists already")


def test_bad_record_is_reported_with_the_options_of_the_command(order, source, cache, tmp_path, capsys):
    source.write_text('{"words": "one"}\n')

    assert problem_of(order(), cache) == (
        f'{source}, line 1: no key "text" (--text-key); the keys are "words"; fix it, or leave such records out with '
        "--on-bad-record skip"
    )
    assert not (tmp_path / "out").exists()
    assert problem_of(order(on_bad_record="skip"), cache) == (
        f"{source}: no text found, but 0 empty documents and 1 skipped records; "
        'check the files and --text-key, which is "text"'
    )
    assert f'warning: {source}, line 1: no key "text" (--text-key); the keys are "words"; left out' in (
        capsys.readouterr().err.splitlines()
    )
    tokenize_sources(order(text_key="words"), cache)


def test_a_worker_process_names_the_option_of_the_command(order, source, cache, monkeypatch):
    source.write_text('{"text": "a text that is not the bad one"}\n' * 40 + '{"words": "one"}\n')
    for module_with_limit in (tokenizing, workers):
        monkeypatch.setattr(module_with_limit, "BLOCK_BYTES", 1 << 9)

    assert problem_of(order(num_workers=1), cache) == (
        f'{source}, line 41: no key "text" (--text-key); the keys are "words"; fix it, or leave such records out with '
        "--on-bad-record skip"
    )


def test_one_document_cannot_be_split(order, source, cache):
    source.write_text('{"text": "one"}\n')

    assert problem_of(order(validation=0.5), cache) == (
        f"{source}: 1 documents cannot be split by --validation 0.5; leave --validation out"
    )


def test_wrong_arguments_are_reported(order, source, cache, tmp_path):
    assert problem_of(order(sources=[f"{tmp_path}/none.txt"]), cache).startswith(
        f'SOURCES: "{tmp_path}/none.txt" does '
    )
    assert problem_of(order(tokenizer=f"{tmp_path}/none"), cache) == (
        f"--tokenizer: {tmp_path}/none does not exist; name a Hugging Face directory, a tokenizer.json or a hub id, "
        "or train one with meshtrain tokenizer train"
    )


def test_second_command_for_the_same_output_is_refused(order, cache, tmp_path, monkeypatch):
    tokenize, messages = tokenize_command.tokenize, []

    def tokenize_after_another_has_come(*arguments, **options):
        messages.append(problem_of(order(), cache))
        tokenize(*arguments, **options)

    monkeypatch.setattr(tokenize_command, "tokenize", tokenize_after_another_has_come)
    tokenize_sources(order(), cache)
    assert [line.partition(", since ")[0] for line in messages] == [
        f"--output {tmp_path}/out is in use by process {os.getpid()} on {socket.gethostname()}"
    ]
    assert messages[0].endswith("; wait until it ends, end it, or choose another --output")
    assert not [path for path in tmp_path.iterdir() if "lock" in path.name]


def test_a_tokenizer_is_trained_into_a_directory(source, tmp_path, capsys):
    train_tokenizer_on_sources([str(source)], 280, tmp_path / "tok")

    assert len(AutoTokenizer.from_pretrained(tmp_path / "tok")) == 280
    assert capsys.readouterr().out.splitlines()[-1] == f"Wrote {tmp_path}/tok: 280 tokens"
    with pytest.raises(DataError) as caught:
        train_tokenizer_on_sources([str(source)], 280, tmp_path / "tok")
    assert str(caught.value) == f"--output: {tmp_path}/tok exists already; remove it, or choose another directory"


def test_tokenizer_is_trained_on_the_first_documents(tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", ["aa aa", "zebra zebra"])

    train_tokenizer_on_sources([str(source)], 5000, tmp_path / "tok", num_documents=1)

    assert "ze" not in "".join(json.loads((tmp_path / "tok/tokenizer.json").read_text())["model"]["vocab"])
    assert capsys.readouterr().err == "warning: the text has too few different words for 5,000 tokens\n"


def test_tokenizer_is_not_trained_on_bad_records(tmp_path):
    (tmp_path / "a.jsonl").write_text("broken\n")

    with pytest.raises(DataError) as caught:
        train_tokenizer_on_sources([f"{tmp_path}/a.jsonl"], 5000, tmp_path / "tok")

    assert str(caught.value).endswith("; fix it, or leave such records out with --on-bad-record skip")
    assert not (tmp_path / "tok").exists()
