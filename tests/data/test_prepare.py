"""Preparing: from the settings of a run file to samples, by one process or many."""

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.config.data import DataConfig, TokenizerConfig
from meshtrain.data.cache import Cache
from meshtrain.data.prepare import PreparedData, prepare_data
from meshtrain.data.samples.dataset import build_dataset, check_enough, train_samples, validation_samples
from meshtrain.data.samples.rows import PackedSamples, PaddedSamples
from meshtrain.errors import DataError
from tests.data.corpora import byte_tokenizer, write_lines

# A fork would inherit broken threads of tokenizers.
context = multiprocessing.get_context("spawn")

TEXTS = [f"document {number} of the corpus" for number in range(100)]


def configure(directory: Path, **options: Any) -> DataConfig:
    """Describe a corpus of TEXTS, one token per byte, in samples of 32 tokens."""
    path = directory / "train.jsonl"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_lines(path, TEXTS)
    defaults: dict[str, Any] = {
        "train": [str(path)],
        "tokenizer": TokenizerConfig(vocab_size=258),
        "sequence_length": 32,
        "cache_directory": str(directory / "cache"),
    }
    return DataConfig(**(defaults | options))


def problems_of(config: DataConfig) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        prepare_data(config)
    return caught.value.lines


def test_training_without_validation(tmp_path, capsys):
    data = prepare_data(configure(tmp_path))

    tokens = sum(len(text) + 1 for text in TEXTS)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"Data: train 100 documents, {tokens:,} tokens; vocabulary 258; tokenized into {tmp_path}/cache"
    )
    assert data.sources[0].validation is None
    assert validation_samples(data) is None
    assert build_dataset(data, global_batch_size=4, seed=0).validation == {}
    assert isinstance(train_samples(data), PackedSamples)
    assert len(train_samples(data)) == (tokens - 1) // 32
    assert data.unigram_entropy_nats == data.sources[0].train.counts.unigram_entropy_nats


def test_second_run_only_opens_the_token_files(tmp_path, capsys):
    first = prepare_data(configure(tmp_path, validation=0.1))
    capsys.readouterr()

    second = prepare_data(configure(tmp_path, validation=0.1))

    out = capsys.readouterr().out
    assert "; vocabulary 258; from " in out
    assert out.count("\n") == 1
    assert second.identity == first.identity
    assert second.sources[0].train.directory == first.sources[0].train.directory


def test_validation_by_fraction(tmp_path):
    data = prepare_data(configure(tmp_path, validation=0.1, form="padded"))

    assert data.sources[0].validation is not None
    assert data.sources[0].train.counts.documents + data.sources[0].validation.counts.documents == 100
    assert 1 <= data.sources[0].validation.counts.documents <= 25
    assert isinstance(validation_samples(data), PaddedSamples)
    assert data.unigram_entropy_nats == data.sources[0].validation.counts.unigram_entropy_nats


def test_validation_by_files(tmp_path, capsys):
    path = write_lines(tmp_path / "validation.jsonl", ["kept aside", "as well"])

    data = prepare_data(configure(tmp_path, validation=[str(path)]))

    assert "; validation 2 documents, 19 tokens; vocabulary 258; tokenized into " in capsys.readouterr().out
    assert data.sources[0].train.counts.documents == 100
    assert data.sources[0].validation is not None
    assert data.sources[0].validation.counts.documents == 2


def test_skipped_records_are_reported(tmp_path, capsys):
    path = write_lines(tmp_path / "train.jsonl", TEXTS)
    path.write_text(path.read_text() + "broken\nbroken\n")

    prepare_data(configure(tmp_path, on_bad_record="skip"))

    assert "; 2 bad records skipped; tokenized into " in capsys.readouterr().out


def test_order_depends_on_the_settings_of_the_run(tmp_path):
    shuffled = prepare_data(configure(tmp_path, validation=0.1))
    plain = prepare_data(configure(tmp_path, validation=0.1, shuffle=False, drop_last=False))
    num_samples = len(train_samples(shuffled))

    feed = build_dataset(shuffled, global_batch_size=7, seed=1)
    first, second = feed.order, build_dataset(plain, global_batch_size=7, seed=1).order
    samples, evaluation = feed.validation["data"]

    assert first.steps_per_epoch == num_samples // 7
    assert second.steps_per_epoch == -(-num_samples // 7)
    assert not np.array_equal(first.sample_ids(0), np.arange(7))
    assert np.array_equal(second.sample_ids(0), np.arange(7))
    seen = np.concatenate([evaluation.sample_ids(step) for step in range(evaluation.steps_per_epoch)])
    assert np.array_equal(seen[seen >= 0], np.arange(len(samples)))


def test_identity_depends_on_the_samples_alone(tmp_path):
    here, there = configure(tmp_path / "here"), configure(tmp_path / "there")
    same = [here, there, configure(tmp_path / "here", shuffle=False)]
    validation = [str(write_lines(tmp_path / "validation.jsonl", ["text"]))]
    others = [
        configure(tmp_path / "here", sequence_length=16),
        configure(tmp_path / "here", form="padded"),
        configure(tmp_path / "here", validation=0.1),
        configure(tmp_path / "here", validation=validation),
        configure(tmp_path / "here", tokenizer=TokenizerConfig(vocab_size=270)),
        configure(tmp_path / "here", train=validation),
    ]

    assert len({prepare_data(config).identity for config in same}) == 1
    assert len({prepare_data(config).identity for config in [here, *others]}) == 1 + len(others)


def test_corpus_of_one_document_cannot_be_split(tmp_path):
    (tmp_path / "a.txt").write_text("a single document of some words, read again and again")

    data = prepare_data(configure(tmp_path, train=[str(tmp_path / "a.txt")], sequence_length=8))

    check_enough(data, 4)
    assert len(train_samples(data)) == 6


def test_all_wrong_sources_are_reported_at_once(tmp_path):
    config = configure(tmp_path, train=[f"{tmp_path}/none.txt"], validation=[f"{tmp_path}/*.csv"])

    assert [problem.split(":")[0] for problem in problems_of(config)] == ["data.train", "data.validation"]


def test_validation_on_training_files_is_refused(tmp_path):
    config = configure(tmp_path)

    assert problems_of(configure(tmp_path, validation=config.train)) == (
        f"data.validation: {tmp_path}/train.jsonl is also in data.train, so a low loss on it means nothing; "
        "leave it out of one of them, or hold documents out with data.validation = 0.05",
    )


def test_missing_tokenizer_settings_are_reported(tmp_path):
    assert problems_of(configure(tmp_path, tokenizer=TokenizerConfig())) == (
        "data.tokenizer: neither `path` nor `vocab_size` is set; "
        "name an existing tokenizer, or the vocabulary size of one to be trained on data.train",
    )


def test_existing_tokenizer_is_used(tmp_path):
    trained = prepare_data(configure(tmp_path))

    found = prepare_data(configure(tmp_path, tokenizer=TokenizerConfig(path=str(trained.tokenizer.directory))))

    assert found.tokenizer == trained.tokenizer
    assert found.identity == trained.identity


def problem_of_size(data: PreparedData, global_batch_size: int) -> str:
    with pytest.raises(DataError) as caught:
        check_enough(data, global_batch_size)
    return str(caught.value)


def test_fewer_samples_than_a_batch_are_reported(tmp_path):
    packed = prepare_data(configure(tmp_path, train=[str(write_lines(tmp_path / "a.jsonl", TEXTS[:10]))]))
    padded = prepare_data(configure(tmp_path, train=packed.config.train, form="padded"))

    check_enough(packed, 7)
    check_enough(padded, 10)
    assert problem_of_size(packed, 9) == (
        "data.train: 10 documents with 250 tokens make 7 packed samples of 32 tokens, and one batch needs 9: "
        "provide more text, lower global_batch_size to 7 or less, set data.drop_last to false "
        "or lower data.sequence_length to 27 or less"
    )
    assert problem_of_size(padded, 11) == (
        "data.train: 10 documents with 250 tokens make 10 padded samples of 32 tokens, and one batch needs 11: "
        "provide more text, lower global_batch_size to 10 or less or set data.drop_last to false"
    )


def test_less_than_one_sample_is_reported(tmp_path):
    validation = [str(write_lines(tmp_path / "validation.jsonl", ["few words"]))]
    data = prepare_data(configure(tmp_path, train=validation, drop_last=False))
    with_validation = prepare_data(configure(tmp_path, validation=validation))

    for key, problem in (
        ("data.train", problem_of_size(data, 8)),
        ("data.validation", problem_of_size(with_validation, 8)),
    ):
        assert problem == (
            f"{key}: 1 documents with 10 tokens make 0 packed samples of 32 tokens, and one batch needs 1: "
            "provide more text or lower data.sequence_length to 9 or less"
        )


def test_without_drop_last_few_samples_are_enough(tmp_path):
    check_enough(prepare_data(configure(tmp_path, drop_last=False)), 1000)


def prepare_elsewhere(config: DataConfig, leads: bool, start: Any, answers: Any) -> None:
    start.wait()
    try:
        answers.put(prepare_data(config, leads=leads).identity)
    except DataError as error:
        answers.put(error.lines)


def prepare_on_four(config: DataConfig) -> list[Any]:
    start, answers = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=prepare_elsewhere, args=(config, rank == 0, start, answers)) for rank in range(4)
    ]
    for process in processes:
        process.start()
    results = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
    return results


def test_all_ranks_prepare_at_once(tmp_path):
    identities = prepare_on_four(configure(tmp_path, validation=0.1))

    assert identities == [prepare_data(configure(tmp_path, validation=0.1)).identity] * 4
    assert len(list((tmp_path / "cache/tokens").glob("*/train"))) == 1


def test_all_ranks_report_a_bad_file(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", TEXTS)
    path.write_text(path.read_text() + "broken\n")

    results = prepare_on_four(configure(tmp_path))

    assert len(set(results)) == 1
    assert results[0][0].startswith(f"{tmp_path}/train.jsonl, line 101: not JSON")


PREPARE = """
import json, sys
from meshtrain.config.data import DataConfig
from meshtrain.data.samples.dataset import check_enough, train_samples
from meshtrain.data.cache import Cache
from meshtrain.data.prepare import prepare_data
data = prepare_data(DataConfig.model_validate_json(sys.argv[1]))
check_enough(data, 4)
print(*sys.modules)
"""


def test_preparing_loads_neither_torch_nor_transformers(tmp_path):
    command = [sys.executable, "-c", PREPARE, configure(tmp_path).model_dump_json()]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()

    assert "meshtrain.data.samples.rows" in loaded
    assert not {"torch", "transformers", "torchdata", "huggingface_hub"}.intersection(loaded)


def test_documents_that_are_cut_off_are_reported(tmp_path, capsys):
    long = str(write_lines(tmp_path / "long.jsonl", ["short", "x" * 40, "x" * 31, "x" * 32]))

    prepare_data(configure(tmp_path, train=[long], form="padded"))
    assert "; 2 documents longer than a sample are cut off; tokenized into " in capsys.readouterr().out
    prepare_data(configure(tmp_path, train=[long]))
    assert "cut off" not in capsys.readouterr().out


def test_tokens_can_be_sources(tmp_path):
    text = configure(tmp_path, validation=0.1)
    first = prepare_data(text)
    tokenizer = TokenizerConfig(path=str(first.tokenizer.directory))
    train, held_out = (str(file.directory) for file in (first.sources[0].train, first.sources[0].validation))
    second = prepare_data(configure(tmp_path, train=[train], validation=[held_out], tokenizer=tokenizer))

    assert second.identity == first.identity
    assert problems_of(configure(tmp_path, train=[train], validation=0.1, tokenizer=tokenizer)) == (
        "data.validation = 0.1: documents of tokenized data cannot be held out; tokenize with "
        "meshtrain tokenize --validation, and name what it wrote",
    )
    assert problems_of(configure(tmp_path, train=[*text.train, train], tokenizer=tokenizer)) == (
        f"data.train: {train} is tokenized already, but is listed with others (1 more); give each its "
        "own source (data.sources.NAME)",
    )
    assert problems_of(configure(tmp_path, train=[train])) == (
        "data.tokenizer.vocab_size: a tokenizer is trained on texts, and all sources are tokenized already; "
        "name the one that they were made with as data.tokenizer.path",
    )
    assert problems_of(configure(tmp_path, train=[train], validation=[train], tokenizer=tokenizer)) == (
        f"data.validation: {train} is also in data.train, so a low loss on it means nothing; leave it out of one of "
        "them, or hold documents out with data.validation = 0.05",
    )


def test_messages_name_the_settings_of_the_source_that_they_concern(tmp_path):
    one = str(write_lines(tmp_path / "one.jsonl", ["single"]))
    tokenizer = TokenizerConfig(path=str(byte_tokenizer(Cache(tmp_path / "cache")).directory))

    def problems_of_source(**source: Any) -> tuple[str, ...]:
        sources = {"web": {"train": [one], **source}}
        return problems_of(DataConfig(sources=sources, tokenizer=tokenizer, cache_directory=f"{tmp_path}/cache"))

    assert problems_of_source(text_key="words") == (
        f'{one}, line 1: no key "words" (data.sources.web.text_key); the keys are "text"; fix it, or leave such '
        'records out with data.on_bad_record = "skip"',
    )
    assert problems_of_source(validation=0.5) == (
        f"{one}: 1 documents cannot be split by data.sources.web.validation = 0.5; "
        "set data.sources.web.validation to files of its own, or to 0",
    )
