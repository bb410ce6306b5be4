"""Relative paths are resolved against the file that contains them."""

import os
from pathlib import Path

import pytest

from meshtrain.config.toml import load_run

PATHS = """
run_directory = "out"
steps = 1
global_batch_size = 1
[model]
path = "model"
[data]
train = ["python-stdlib", "texts/*.jsonl", "/abs/b.txt", "../c.txt"]
validation = ["d.txt"]
cache_directory = "cache"
tokenizer.path = "./tokenizer"
"""


def test_paths_are_relative_to_their_file(write, tmp_path):
    write("runs/base.toml", PATHS, whole=False)
    write("top.toml", 'extends = "runs/base.toml"\ndata.validation = ["e.txt"]', whole=False)
    (tmp_path / "runs" / "model").mkdir()

    config = load_run("top.toml", ["data.cache_directory=here"])

    assert config.run_directory == str(tmp_path / "runs/out")
    assert config.model.path == str(tmp_path / "runs/model")
    assert config.data.train == [
        "python-stdlib",
        str(tmp_path / "runs/texts/*.jsonl"),
        "/abs/b.txt",
        str(tmp_path / "c.txt"),
    ]
    assert config.data.validation == [str(tmp_path / "e.txt")]
    assert config.data.cache_directory == str(tmp_path / "here")
    assert config.data.tokenizer.path == str(tmp_path / "runs/tokenizer")


def test_home_is_expanded(write):
    config = load_run(write(), ["run_directory=~/out", "data.tokenizer.path=~/tokenizer", 'data.train=["~/a.txt"]'])

    home = os.path.expanduser("~")
    assert config.run_directory == f"{home}/out"
    assert config.data.tokenizer.path == f"{home}/tokenizer"
    assert config.data.train == [f"{home}/a.txt"]
    assert config.data.cache_directory == f"{home}/.cache/meshtrain"


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B"])
def test_hub_id_is_kept_unless_it_is_a_local_directory(write, tmp_path, name):
    path = write()

    assert load_run(path, ["model.type=", f"model.path={name}"]).model.path == name
    Path(name).mkdir(parents=True)
    assert load_run(path, ["model.type=", f"model.path={name}"]).model.path == str(tmp_path / name)


@pytest.mark.parametrize("name", ["tokenizer.json", "./gpt2", "a/b/c", "../gpt2", "a b"])
def test_name_that_cannot_be_a_hub_id_is_a_path(write, tmp_path, name):
    config = load_run(write(), [f'data.tokenizer.path="{name}"'])

    assert config.data.tokenizer.path == os.path.normpath(tmp_path / name)
