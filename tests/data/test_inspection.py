"""Inspecting: it shows exactly what the model receives."""

import numpy as np
import pytest

from meshtrain import console
from meshtrain.config.data import DataConfig, TokenizerConfig
from meshtrain.data.cache import Cache
from meshtrain.data.inspection import inspect_run, inspect_tokens, sample_spans
from meshtrain.data.tokens.tokenize_command import TokenizeRequest, tokenize_sources
from meshtrain.data.tokens.tokenizer_training import train_tokenizer_on_sources
from meshtrain.errors import DataError
from tests.data.corpora import byte_tokenizer, write_lines

TEXTS = ["first one", "second", "a third \x1b[31mof\r them\nin two lines", "日本語"]
BORDER = "── a document begins ──"


@pytest.fixture
def config(tmp_path) -> DataConfig:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    return DataConfig(
        train=[str(path)],
        tokenizer=TokenizerConfig(vocab_size=258),
        sequence_length=12,
        cache_directory=f"{tmp_path}/cache",
    )


def shown(config: DataConfig, capsys, *, first: int = 0, count: int = 1, part: str = "train") -> list[str]:
    inspect_run(config, part=part, first=first, count=count, name="run.toml")
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Sample "))
    return lines[start:]


def test_packed_sample_shows_its_documents_and_what_is_trained_on(config, capsys):
    assert shown(config, capsys) == [
        "Sample 0 of 5: 13 tokens of 2 documents, 12 trained on",
        "⟦f⟧irst one<|endoftext|>",
        BORDER,
        "sec",
        "",
    ]


def test_first_token_of_a_separate_document_is_not_trained_on(config, capsys):
    separate = config.model_copy(update={"documents": "separate"})

    assert shown(separate, capsys) == [
        "Sample 0 of 5: 13 tokens of 2 documents, 11 trained on",
        "⟦f⟧irst one<|endoftext|>",
        BORDER,
        "⟦s⟧ec",
        "",
    ]


def test_a_padded_sample_shows_its_pads(config, capsys):
    padded = config.model_copy(update={"form": "padded"})

    assert shown(padded, capsys, first=1) == [
        "Sample 1 of 4: 7 tokens of 1 documents, 6 trained on, 5 pads",
        "⟦s⟧econd<|endoftext|>",
        "",
    ]


def test_control_characters_are_shown_as_symbols(config, capsys):
    lines = shown(config, capsys, first=1, count=2)

    assert [line for line in lines if line.startswith("Sample ")] == [
        "Sample 1 of 5: 13 tokens of 2 documents, 12 trained on",
        "Sample 2 of 5: 13 tokens of 1 documents, 12 trained on",
    ]
    assert "\x1b" not in "".join(lines)
    assert "a thir" in "".join(lines)
    assert "␛[31mof␍ th" in "".join(lines)


def test_index_out_of_range_is_reported(config):
    for first, count, asked in ((5, 1, "5 is"), (4, 3, "4 to 6 is")):
        with pytest.raises(DataError) as caught:
            inspect_run(config, part="train", first=first, count=count, name="run.toml")

        assert str(caught.value) == (
            f"--index: {asked} asked for and the train data of run.toml have 5 samples; choose from 0 to 4"
        )


def test_data_shorter_than_a_sample_are_reported(config):
    with pytest.raises(DataError) as caught:
        inspect_run(config.model_copy(update={"sequence_length": 500}), part="train", first=0, count=1, name="run.toml")

    assert str(caught.value) == (
        "there is nothing to show: the train data of run.toml have no samples; lower data.sequence_length, or add text"
    )


def test_missing_validation_data_are_reported(config):
    with pytest.raises(DataError) as caught:
        inspect_run(config, part="validation", first=0, count=1, name="run.toml")

    assert str(caught.value) == "--part: run.toml has no validation data; set data.validation, or leave --part out"


def test_validation_data_are_shown(config, capsys):
    held_out = config.model_copy(update={"validation": 0.1, "sequence_length": 4})

    assert shown(held_out, capsys, part="validation")[0].startswith("Sample 0 of ")


def test_text_that_is_not_trained_on_is_marked():
    arrays = {
        "input_ids": np.array([[5, 6, 7, 8, 9]]),
        "labels": np.array([[-100, 7, 8, -100, 10]]),
        "position_ids": np.array([[0, 1, 2, 0, 1]]),
    }

    spans, num_pads = sample_spans(arrays, 0, end_id=9)

    assert [(span.tokens.tolist(), span.is_trained, span.begins_document) for span in spans] == [
        ([5, 6], False, False),
        ([7], True, False),
        ([8], True, True),
        ([9], False, False),
        ([10], True, False),
    ]
    assert num_pads == 0


@pytest.mark.parametrize("kind", ["meshtrain", "megatron"])
def test_document_of_a_token_file_is_shown(tmp_path, capsys, kind):
    cache = Cache(tmp_path / "cache")
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    tokenizer = str(byte_tokenizer(cache).directory)
    tokenize_sources(TokenizeRequest([str(source)], tokenizer, tmp_path / "out", format=kind), cache)
    capsys.readouterr()

    inspect_tokens(f"{tmp_path}/out/train", None, cache, first=3, count=1)

    assert capsys.readouterr().out.splitlines() == [
        "Document 3 of 4, from token 52 on: 10 tokens of 1 documents, 10 trained on",
        "日本語<|endoftext|>",
        "",
    ]
    with pytest.raises(DataError, match="out/train has 4 documents; choose from 0 to 3"):
        inspect_tokens(f"{tmp_path}/out/train", None, cache, first=4, count=1)
    with pytest.raises(DataError, match="holds several token files; name one of them"):
        inspect_tokens(f"{tmp_path}/out", None, cache, first=0, count=1)


def test_wrong_tokenizer_is_reported_with_the_option_of_the_command(tmp_path):
    cache = Cache(tmp_path / "cache")
    source = write_lines(tmp_path / "a.jsonl", ["aa aa aa"])
    tokenize_sources(TokenizeRequest([str(source)], str(byte_tokenizer(cache).directory), tmp_path / "out"), cache)
    train_tokenizer_on_sources([str(source)], 260, tmp_path / "other")

    with pytest.raises(DataError, match="name the tokenizer it was made with as --tokenizer, or tokenize again"):
        inspect_tokens(f"{tmp_path}/out/train", f"{tmp_path}/other", cache, first=0, count=1)


def test_source_that_cannot_be_inspected_is_reported(tmp_path):
    cache = Cache(tmp_path / "cache")
    (tmp_path / "a.bin").touch()
    for name, problem in (
        ("none", f"{tmp_path}/none is neither a run file (.toml) nor a token file nor a Megatron-LM pair; name one"),
        (
            "a.bin",
            f"there is no tokenizer beside {tmp_path}/a.bin, at {tmp_path}/tokenizer; "
            "name the one that it was written with as --tokenizer",
        ),
    ):
        with pytest.raises(DataError) as caught:
            inspect_tokens(f"{tmp_path}/{name}", None, cache, first=0, count=1)

        assert str(caught.value) == problem


def test_text_is_colored_on_a_terminal(config, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console.configure()
    try:
        inspect_run(config, part="train", first=0, count=1, name="run.toml")
    finally:
        monkeypatch.undo()
        console.configure()

    out = capsys.readouterr().out
    assert "\x1b[2mf\x1b[0m\x1b[32mirst one" in out
    assert "⟦" not in out
