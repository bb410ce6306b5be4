"""Corpus files are read, checked and described like run files."""

import os

import pytest

from meshtrain.config.corpus import STEPS, CorpusConfig
from meshtrain.config.schema import described_schema
from meshtrain.config.toml import dump_toml, load_corpus
from meshtrain.errors import ConfigError

CORPUS = 'directory = "out"\nsources = ["texts/*.jsonl", "python-stdlib", "~/more.txt"]\n[clean]\n[split]\n'


def problems_of(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_corpus(path, overrides)
    return list(caught.value.lines)


def test_paths_are_relative_to_the_file_and_steps_are_in_order(tmp_path, write, monkeypatch):
    path = write("deep/corpus.toml", CORPUS.replace("[clean]", '[clean]\ntokenizer = "tok"'), whole=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir("/")

    config = load_corpus(path)

    assert config.directory == f"{tmp_path}/deep/out"
    assert config.sources == [f"{tmp_path}/deep/texts/*.jsonl", "python-stdlib", f"{tmp_path}/home/more.txt"]
    assert config.clean is not None
    assert config.clean.tokenizer == f"{tmp_path}/deep/tok"
    assert config.steps == ("clean", "split")
    assert config.workers == os.cpu_count()


def test_file_extends_another_and_overrides_win(write):
    write("base.toml", CORPUS, whole=False)
    write("corpus.toml", 'extends = "base.toml"\n[clean]\nminimum_tokens = 5\n[shuffle]\nseed = 3\n', whole=False)

    config = load_corpus("corpus.toml", ["shuffle.seed=4", "split="])

    assert (config.clean.minimum_tokens, config.shuffle.seed) == (5, 4)
    assert config.steps == ("clean", "shuffle")


def test_dumped_corpus_loads_back_equal(write):
    write("corpus.toml", CORPUS, whole=False)
    config = load_corpus("corpus.toml")
    write("again.toml", dump_toml(config), whole=False)

    assert load_corpus("again.toml") == config


MISTAKES = {
    ("sources=",): "neither `sources` nor `urls` is set; set one: existing documents, or links",
    ('urls.lists=["a.txt"]',): "`sources` and `urls` are both set; set one: existing documents, or links",
    ("download={}",): "`download` fetches the links of `urls`; add a table [urls] with their `lists`",
    ("sources=", 'urls.lists=["a.txt"]'): (
        "`urls` makes links and no text; add a table [download], or leave out the steps after it"
    ),
    ("clean=", "split="): "no step is set; add a table for each: "
    "[urls], [download], [clean], [deduplicate], [shuffle], [split]",
    ("executor=slurm",): '`executor` = "slurm" needs a table [slurm] with `time` and `partition`',
    ("split.test=0.995",): "split: `validation` + `test` is 1.005; nothing is left to train on",
    ("clean.languages=en",): "clean.languages: expected a list of strings, found the string 'en'",
    ("clean.minimum_token=3",): "clean.minimum_token: unknown key; did you mean 'minimum_tokens'?",
    ("claen.minimum_tokens=3",): "claen: unknown key; did you mean 'clean'?",
    (
        "executor=slrum",
    ): "executor: expected 'local', 'slurm' or 'ray', found the string 'slrum'; did you mean 'slurm'?",
    ("deduplicate.similarity=0.0",): "deduplicate.similarity: expected a number from 0.1 to 1, found 0.0",
}


@pytest.mark.parametrize("overrides", MISTAKES, ids=" ".join)
def test_each_mistake_is_one_line(write, overrides):
    write("corpus.toml", CORPUS, whole=False)

    (problem,) = problems_of("corpus.toml", *overrides)

    assert problem.partition(": ")[2] == MISTAKES[overrides]


def test_missing_file_and_circular_extends_are_refused(write):
    write("corpus.toml", 'extends = "corpus.toml"', whole=False)
    assert problems_of("corpsu.toml")[0].startswith("no file 'corpsu.toml' in ")
    assert problems_of("corpus.toml")[0].startswith("corpus.toml: extends: goes in a circle: ")


def test_every_key_is_described_in_the_schema():
    schema = described_schema("corpus")
    tables = [schema, *schema["$defs"].values()]
    unexplained = [
        name
        for table in tables
        for name, part in table["properties"].items()
        if "description" not in part and not any("$ref" in form for form in [part, *part.get("anyOf", ())])
    ]

    assert unexplained == []
    assert set(STEPS) < set(CorpusConfig.model_fields)
