"""Samples: what is cut from a token file is exactly what is in it."""

import random

import numpy as np
import pytest

from meshtrain.data.order import FILLER
from meshtrain.data.samples import IGNORE_INDEX, PackedSamples, PaddedSamples
from tests.data.corpora import expected_tokens, random_texts, token_file


@pytest.mark.parametrize("seed", range(5))
def test_packed_samples_cover_exactly_the_stream(tmp_path, seed):
    rng = random.Random(seed)
    texts = random_texts(rng, count=rng.randint(1, 60))
    tokens, tokenizer = token_file(tmp_path, texts)
    stream = np.concatenate(expected_tokens(texts, tokenizer))
    for sequence_length in (1, 2, 7, 64, len(stream) - 1):
        samples = PackedSamples(tokens, sequence_length, pad_id=tokenizer.pad_id)
        covered = (len(stream) - 1) // sequence_length * sequence_length

        rows = samples.read(np.arange(len(samples)))

        assert rows.keys() == {"input_ids", "labels"}
        assert {array.dtype for array in rows.values()} == {np.dtype(np.int64)}
        assert np.array_equal(rows["input_ids"].reshape(-1), stream[:covered])
        assert np.array_equal(rows["labels"].reshape(-1), stream[1 : covered + 1])


def test_a_text_of_less_than_one_sequence_makes_no_packed_sample(tmp_path):
    tokens, _ = token_file(tmp_path, ["abc"])

    assert len(PackedSamples(tokens, 3, pad_id=0)) == 1
    assert len(PackedSamples(tokens, 4, pad_id=0)) == 0
    assert len(PackedSamples(tokens, 400, pad_id=0)) == 0


def test_any_samples_in_any_order_with_fillers(tmp_path):
    tokens, tokenizer = token_file(tmp_path, random_texts(random.Random(0), 30))
    for form in (PackedSamples, PaddedSamples):
        samples = form(tokens, 8, pad_id=tokenizer.pad_id)
        everything = samples.read(np.arange(len(samples)))

        some = samples.read(np.array([5, FILLER, 0, 5]))

        for name, array in some.items():
            assert np.array_equal(array[[0, 2, 3]], everything[name][[5, 0, 5]])
        assert (some["input_ids"][1] == tokenizer.pad_id).all()
        assert (some["labels"][1] == IGNORE_INDEX).all()


def padded_row(document: list[int], sequence_length: int, pad_id: int) -> tuple[list[int], list[int], list[int]]:
    kept = document[:sequence_length]
    pads = sequence_length - len(kept)
    labels = [*kept[1:], *[IGNORE_INDEX] * (pads + 1)]
    return [*kept, *[pad_id] * pads], [*[1] * len(kept), *[0] * pads], labels


@pytest.mark.parametrize("sequence_length", [1, 5, 16, 50])
def test_padded_samples_hold_one_document_each(tmp_path, sequence_length):
    texts = random_texts(random.Random(1), count=40)
    tokens, tokenizer = token_file(tmp_path, texts)
    samples = PaddedSamples(tokens, sequence_length, pad_id=tokenizer.pad_id)

    rows = samples.read(np.arange(len(samples)))

    assert len(samples) == 40
    assert {array.dtype for array in rows.values()} == {np.dtype(np.int64)}
    expected = [
        padded_row(document, sequence_length, tokenizer.pad_id) for document in expected_tokens(texts, tokenizer)
    ]
    for name, column in zip(("input_ids", "attention_mask", "labels"), zip(*expected, strict=True), strict=True):
        assert rows[name].tolist() == list(column)


def test_the_end_token_is_trained_on_even_where_it_is_the_pad(tmp_path):
    tokens, tokenizer = token_file(tmp_path, ["ab", "abcdef"])
    end = tokenizer.end_id
    a, b, *_ = expected_tokens(["ab"], tokenizer)[0]

    rows = PaddedSamples(tokens, 5, pad_id=end).read(np.array([0]))

    assert rows["input_ids"].tolist() == [[a, b, end, end, end]]
    assert rows["labels"].tolist() == [[b, end, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 0, 0]]


def test_attention_over_a_filler_row_sees_something(tmp_path):
    tokens, tokenizer = token_file(tmp_path, ["ab"])

    rows = PaddedSamples(tokens, 4, pad_id=tokenizer.pad_id).read(np.array([FILLER]))

    assert rows["attention_mask"].tolist() == [[1, 0, 0, 0]]
