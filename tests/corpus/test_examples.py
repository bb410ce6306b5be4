"""The shipped corpus files can be read, and prepare a small corpus."""

import json
from pathlib import Path

import pytest

from meshtrain.config.toml import load_corpus
from tests.corpus.preparations import counts_of, prepare, read_shards

SHIPPED = sorted((Path(__file__).parents[2] / "launch" / "corpus").glob("*.toml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_file_names_every_step_it_needs(file):
    config = load_corpus(file)

    assert config.steps[-4:] == ("clean", "deduplicate", "shuffle", "split")
    assert Path(config.directory).parts[-3:] == ("runs", "corpus", file.stem)


def test_the_shipped_python_corpus_file_prepares_training_data(tmp_path, capsys):
    """Only a part of the library is used, so that the test takes seconds."""
    for name in ("json", "email", "encodings"):
        source = Path(json.__file__).parents[1] / name
        for path in source.glob("*.py"):
            (tmp_path / f"{name}-{path.stem}.txt").write_text(path.read_text())
    (file,) = (file for file in SHIPPED if file.stem == "python-stdlib")
    prepare(file, f'directory="{tmp_path}/out"', f'sources=["{tmp_path}/*.txt"]', "workers=1")

    dropped = counts_of(tmp_path / "out" / "03-deduplicate")["dropped"]
    assert dropped["near duplicate"] > 20
    train = read_shards(tmp_path / "out" / "05-split" / "train")
    assert "json-decoder.txt" in {record["id"] for record in train}
    assert capsys.readouterr().out.splitlines()[-1].startswith("Done. Train on it: meshtrain train RUN 'data.train=[")
