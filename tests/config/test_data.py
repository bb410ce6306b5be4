"""Words about data that contradict each other: each is told in a line that says what to do."""

import pytest

from meshtrain.config.toml import dump_toml, load_run
from meshtrain.errors import ConfigError

SOURCES = ('data.sources.a.train=["a.jsonl"]', "data.tokenizer.path=tok")


def problem_of(path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    (problem,) = caught.value.problems
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
            "`streaming` has no documents to keep aside; give `validation` files of its own",
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
def test_of_one_source(write, overrides, problem):
    assert problem_of(write(), *overrides) == problem


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["data.text_key=content"],
            "both `sources` and `text_key` given; with several sources each has its own: `sources.a.text_key`",
        ),
        (
            ["data.sources.a.streaming=true", "data.sources.a.repeat=false"],
            "`sources.a.streaming` and `repeat` = false: where a stream ends is not known before; leave `repeat` out, "
            "`steps` ends the run",
        ),
    ],
)
def test_of_several(write, overrides, problem):
    assert problem_of(write(), *SOURCES, *overrides) == problem


def test_a_resolved_mixture_can_be_read_again(write, tmp_path):
    config = load_run(write(), SOURCES)
    (tmp_path / "again.toml").write_text(dump_toml(config))

    assert load_run(tmp_path / "again.toml") == config
