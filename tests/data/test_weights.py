"""The weights of records are those of the labels of their tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshtrain.config.data import IGNORE_INDEX, DataConfig, TokenizerConfig
from meshtrain.data.prepare import prepare_data
from meshtrain.data.samples.dataset import train_samples, validation_samples
from meshtrain.data.samples.order import FILLER
from meshtrain.data.samples.weights import tokens_of_labels, weighted_labels
from meshtrain.data.tokens.token_file import TokenFile
from meshtrain.errors import DataError
from meshtrain.training.weighted_loss import split_labels

TEXTS = ["one text", "another, which is longer", "a third", "the last text of all"]
WEIGHTS = [0.5, 3.0, 0.0, 1.25]


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def config(directory: Path, **changes: Any) -> DataConfig:
    records = [{"text": text, "importance": weight} for text, weight in zip(TEXTS, WEIGHTS, strict=True)]
    settings: dict[str, Any] = {
        "train": [write(directory / "text.jsonl", records)],
        "weight_key": "importance",
        "sequence_length": 7,
        "tokenizer": TokenizerConfig(vocab_size=258),
        "cache_directory": str(directory / "cache"),
        **changes,
    }
    return DataConfig(**settings)


def read(prepared: Any, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the weights of labels."""
    arrays = train_samples(prepared).read(np.array(ids))
    labels, weights = split_labels(torch.from_numpy(arrays["labels"]))
    np.testing.assert_array_equal(labels.numpy(), tokens_of_labels(arrays["labels"]))
    return labels.numpy(), weights.numpy()


def tokens_and_weights(file: TokenFile) -> tuple[np.ndarray, np.ndarray]:
    assert file.weights is not None
    return np.asarray(file.tokens), np.repeat(np.asarray(file.weights), np.diff(file.offsets))


@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_packed_labels_have_the_weight_of_their_document(documents: str, tmp_path: Path) -> None:
    prepared = prepare_data(config(tmp_path, documents=documents))
    (source,) = prepared.sources
    assert isinstance(source.train, TokenFile)
    tokens, weights = tokens_and_weights(source.train)
    assert sorted(set(weights.tolist())) == sorted(WEIGHTS)
    labels, found = read(prepared, [*range(len(train_samples(prepared))), FILLER])
    size = 7 * (len(labels) - 1)
    counts = labels != IGNORE_INDEX
    np.testing.assert_array_equal(np.where(counts, found, 0), found)
    wanted = np.append(weights[1 : size + 1].reshape(-1, 7), np.zeros((1, 7)), axis=0)
    np.testing.assert_array_equal(found, np.where(counts, wanted, 0))
    np.testing.assert_array_equal(labels[counts], np.append(tokens[1 : size + 1], [0] * 7)[counts.ravel()])


def test_padded_labels_have_the_weight_of_their_document(tmp_path: Path) -> None:
    prepared = prepare_data(config(tmp_path, form="padded", sequence_length=40))
    labels, found = read(prepared, [3, FILLER, 1, 0, 2])
    wanted = np.array([1.25, 0.0, 3.0, 0.5, 0.0])[:, None]
    np.testing.assert_array_equal(found, np.where(labels != IGNORE_INDEX, wanted, 0))
    assert (labels != IGNORE_INDEX).any(1).tolist() == [True, False, True, True, True]


def test_completions_and_chats_have_weights(tmp_path: Path) -> None:
    records = [{"prompt": "a b", "completion": text, "w": it} for text, it in zip(TEXTS, WEIGHTS, strict=True)]
    text = write(tmp_path / "plain.jsonl", [{"text": text} for text in TEXTS])
    tokenizer = prepare_data(config(tmp_path, train=[text], weight_key=None)).tokenizer.directory
    prepared = prepare_data(
        config(
            tmp_path,
            train=[write(tmp_path / "completions.jsonl", records)],
            weight_key="w",
            format="completion",
            form="padded",
            sequence_length=40,
            tokenizer=TokenizerConfig(path=str(tokenizer)),
        )
    )
    labels, found = read(prepared, [1])
    trained = labels != IGNORE_INDEX
    assert not trained[0, :2].any()
    assert set(found[trained].tolist()) == {3.0}


def test_sources_without_weights_have_weight_1_and_validation_has_none(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.jsonl", [{"text": f"{number} {TEXTS[1]}"} for number in range(30)])
    base = config(tmp_path)
    sources = {"a": {"train": base.train, "weight_key": "importance"}, "b": {"train": [plain], "validation": 0.5}}
    mixed = DataConfig.model_validate(
        {
            "sources": sources,
            "sequence_length": 7,
            "form": "padded",
            "tokenizer": {"vocab_size": 258},
            "cache_directory": base.cache_directory,
        }
    )
    prepared = prepare_data(mixed)
    _, found = read(prepared, [1, len(TEXTS)])
    assert [sorted(set(row[row > 0].tolist())) for row in found] == [[3.0], [1.0]]
    held_out = validation_samples(prepared)
    assert held_out is not None
    assert held_out.read(np.array([0]))["labels"].max() < 258


def test_data_without_weights_keeps_its_files_and_its_identity(tmp_path: Path) -> None:
    plain = prepare_data(config(tmp_path, weight_key=None))
    (source,) = plain.sources
    assert isinstance(source.train, TokenFile)
    assert source.train.weights is None
    counts = json.loads((source.train.directory / "counts.json").read_text())
    del counts["weights_hash"]
    (source.train.directory / "counts.json").write_text(json.dumps(counts))
    # Files from before weights are read, and the data is the same for a run that resumes.
    assert TokenFile.open(source.train.directory).identity == source.train.identity
    assert prepare_data(config(tmp_path)).identity != plain.identity


def test_bits_of_weights_survive() -> None:
    labels = np.array([[0, 2**32 - 1, IGNORE_INDEX, 17]])
    weights = np.array([[0.1, 1e6, 5.0, 0.0]])
    found, back = split_labels(torch.from_numpy(weighted_labels(labels, weights)))
    np.testing.assert_array_equal(found.numpy(), labels)
    np.testing.assert_array_equal(back.numpy(), np.array([[0.1, 1e6, 0.0, 0.0]], np.float32))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, 'no key "importance" (data.weight_key)'),
        ({"text": "a", "importance": "high"}, 'the key "importance" (data.weight_key) holds text and not a number'),
        ({"text": "a", "importance": True}, "and not a number"),
        (
            {"text": "a", "importance": -1},
            'the key "importance" (data.weight_key) holds -1, and weights are from 0 to 1,000,000',
        ),
        ({"text": "a", "importance": float("nan")}, "holds nan, and weights are from 0 to 1,000,000"),
    ],
)
def test_bad_weights_are_refused(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        prepare_data(config(tmp_path, train=[write(tmp_path / "bad.jsonl", [{"text": "b", "importance": 1}, record])]))
    assert message in str(caught.value)


def test_tokens_without_records_have_no_weights(tmp_path: Path) -> None:
    (source,) = prepare_data(config(tmp_path)).sources
    assert isinstance(source.train, TokenFile)
    with pytest.raises(DataError) as caught:
        prepare_data(config(tmp_path, train=[str(source.train.directory)]))
    assert "data.weight_key: " in str(caught.value)
    assert "is tokenized already, and its records are gone; name the text, or leave it out" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_key": "importance"}, '`text_key` and `weight_key` are both "importance"; name two keys'),
        (
            {"streaming": True, "tokenizer": TokenizerConfig(path="tok")},
            "`weight_key` is set, and samples of a source with `streaming` have no weights; leave out one of them",
        ),
    ],
)
def test_weights_that_nothing_reads_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`") as caught:
        config(tmp_path, **changes)
    assert message in str(caught.value)
