"""Contradictions between data settings are one-line errors with advice."""

import pytest

from meshtrain.config.toml import dump_toml, load_run
from meshtrain.errors import ConfigError

SOURCES = ('data.sources.a.train=["a.jsonl"]', "data.tokenizer.path=tok")


def problem_of(path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    (problem,) = caught.value.lines
    return problem.partition("data: ")[2]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["data.form=padded", "data.documents=separate"],
            '`documents` = "separate" is for `form` = "packed"; a padded sample is one document anyway',
        ),
        (
            ["data.pad_to_multiple_of=8"],
            '`pad_to_multiple_of` is for `form` = "padded"; packed samples are all of one length',
        ),
        (
            ["data.group_by_length=8"],
            '`group_by_length` is for `form` = "padded"; packed samples are all of one length',
        ),
        (
            ["data.streaming=true", "data.tokenizer.vocab_size=300"],
            "`streaming` needs `tokenizer.path`: a tokenizer cannot be trained on what is only read once",
        ),
        (
            ["data.streaming=true", "data.tokenizer.path=tok", "data.validation=0.1"],
            "`streaming` cannot keep documents aside; set `validation` to files of its own",
        ),
        (
            [
                *("data.streaming=true", "data.tokenizer.path=tok", "data.form=padded"),
                *("data.pad_to_multiple_of=8", "data.group_by_length=8"),
            ],
            "`group_by_length` needs the lengths of all samples, which `streaming` does not have",
        ),
    ],
)
def test_contradictions_of_one_source_are_refused(write, overrides, problem):
    assert problem_of(write(), *overrides) == problem


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["data.text_key=content"],
            "both `sources` and `text_key` are set; with several sources each has its own: `sources.a.text_key`",
        ),
        (
            ["data.sources.a.streaming=true", "data.sources.a.repeat=false"],
            "`sources.a.streaming` and `repeat` = false: the end of a stream is not known in advance; leave `repeat` "
            "out, `steps` ends the run",
        ),
    ],
)
def test_contradictions_of_several_sources_are_refused(write, overrides, problem):
    assert problem_of(write(), *SOURCES, *overrides) == problem


def test_resolved_mixture_loads_back(write, tmp_path):
    config = load_run(write(), SOURCES)
    (tmp_path / "again.toml").write_text(dump_toml(config))

    assert load_run(tmp_path / "again.toml") == config


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ['data.tokenizer.special_tokens=["<a>"]'],
            "data.tokenizer: `special_tokens` are added to an existing tokenizer; set its `path`",
        ),
        (
            ["model.enlarge_vocabulary=true", "data.tokenizer.path=tok"],
            '`enlarge_vocabulary` = true adds rows to pretrained weights; set `weights` = "pretrained", or for a new '
            "model `config` = { vocab_size = ... }",
        ),
    ],
)
def test_contradictions_about_new_tokens_are_refused(write, overrides, problem):
    with pytest.raises(ConfigError) as caught:
        load_run(write(), overrides)
    assert any(found.endswith(problem) for found in caught.value.lines), caught.value.lines


def test_vocabulary_is_enlarged_to_that_of_a_tokenizer(write):
    model = 'model = { path = "m", weights = "pretrained", enlarge_vocabulary = true }'
    path = write(text=f'run_directory = "out"\nsteps = 1\nglobal_batch_size = 8\n{model}\n', whole=False)
    with pytest.raises(ConfigError) as caught:
        load_run(path, ["data.tokenizer.vocab_size=300"])
    assert caught.value.lines[0].endswith(
        "`model.enlarge_vocabulary` = true, but `data.tokenizer.path`, which defines the number of tokens, is not set; "
        "name the tokenizer of the model"
    )
