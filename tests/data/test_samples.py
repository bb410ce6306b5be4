"""Samples: they hold exactly the tokens of the token file."""

import random
from dataclasses import replace

import numpy as np
import pytest

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.data.samples.order import FILLER
from meshtrain.data.samples.rows import MixedSamples, PackedSamples, PaddedSamples
from meshtrain.data.tokens.token_file import ArrayFile, TokenFile
from tests.data.corpora import expected_tokens, random_texts, token_file


@pytest.mark.parametrize("seed", range(5))
def test_packed_samples_cover_all_tokens(tmp_path, seed):
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


def test_text_shorter_than_a_sequence_gives_no_packed_sample(tmp_path):
    tokens, _ = token_file(tmp_path, ["abc"])

    assert len(PackedSamples(tokens, 3, pad_id=0)) == 1
    assert len(PackedSamples(tokens, 4, pad_id=0)) == 0
    assert len(PackedSamples(tokens, 400, pad_id=0)) == 0


def test_samples_are_read_in_any_order_with_fillers(tmp_path):
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


def test_end_token_is_trained_on_even_if_it_is_the_pad(tmp_path):
    tokens, tokenizer = token_file(tmp_path, ["ab", "abcdef"])
    end = tokenizer.end_id
    a, b, *_ = expected_tokens(["ab"], tokenizer)[0]

    rows = PaddedSamples(tokens, 5, pad_id=end).read(np.array([0]))

    assert rows["input_ids"].tolist() == [[a, b, end, end, end]]
    assert rows["labels"].tolist() == [[b, end, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 0, 0]]


def test_filler_row_is_not_fully_masked(tmp_path):
    tokens, tokenizer = token_file(tmp_path, ["ab"])

    rows = PaddedSamples(tokens, 4, pad_id=tokenizer.pad_id).read(np.array([FILLER]))

    assert rows["attention_mask"].tolist() == [[1, 0, 0, 0]]


def test_separate_documents_restart_positions_and_do_not_train_their_first_token(tmp_path):
    texts = random_texts(random.Random(2), count=50, longest=12)
    tokens, tokenizer = token_file(tmp_path, texts)
    documents = expected_tokens(texts, tokenizer)
    stream = np.concatenate(documents)
    begins = np.cumsum([0, *map(len, documents)])
    samples = PackedSamples(tokens, 16, pad_id=tokenizer.pad_id, separate_documents=True)

    rows = samples.read(np.append(np.arange(len(samples)), FILLER))

    for sample in range(len(samples)):
        start = sample * 16
        for column in range(16):
            place = start + column
            document_start = begins[np.searchsorted(begins, place, "right") - 1]
            assert rows["input_ids"][sample, column] == stream[place]
            assert rows["position_ids"][sample, column] == place - max(document_start, start)
            expected_label = IGNORE_INDEX if place + 1 in begins else stream[place + 1]
            assert rows["labels"][sample, column] == expected_label
    assert rows["position_ids"][-1].tolist() == list(range(16))
    assert (rows["labels"][-1] == IGNORE_INDEX).all()


def marked(tokens: TokenFile, marks: np.ndarray) -> TokenFile:
    path = tokens.directory / "trained.bin"
    marks.tofile(path)
    return replace(tokens, trained_file=ArrayFile(path, marks.dtype, len(marks)))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("form", ["packed", "separate", "padded"])
def test_everything_but_tokens_is_the_same_without_tokens(tmp_path, form, trained):
    tokens, tokenizer = token_file(tmp_path, random_texts(random.Random(3), count=30))
    if trained:
        tokens = marked(tokens, np.random.default_rng(0).random(tokens.counts.tokens) < 0.5)
    if form == "padded":
        samples = PaddedSamples(tokens, 16, pad_id=tokenizer.pad_id)
    else:
        samples = PackedSamples(tokens, 16, pad_id=tokenizer.pad_id, separate_documents=form == "separate")
    ids = np.array([3, FILLER, 0, 7])

    whole, blank = samples.read(ids), samples.read(ids, with_tokens=False)

    assert whole.keys() == blank.keys()
    for name in whole.keys() - {"input_ids", "labels"}:
        assert np.array_equal(whole[name], blank[name])
    is_trained = whole["labels"] != IGNORE_INDEX
    assert np.array_equal(is_trained, blank["labels"] != IGNORE_INDEX)
    assert set(blank["input_ids"][[0, 2, 3]].ravel().tolist()) <= {0, tokenizer.pad_id}
    assert set(blank["labels"].ravel().tolist()) <= {0, IGNORE_INDEX}
    if trained:
        assert 0.2 < is_trained[[0, 2, 3]].mean() < 0.6 if form != "padded" else is_trained.any()


def test_only_what_is_marked_is_trained_on(tmp_path):
    texts = ["abcdef", "ghi"]
    tokens, tokenizer = token_file(tmp_path, texts)
    marks = np.array([0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0], bool)
    tokens = marked(tokens, marks)
    first, second = expected_tokens(texts, tokenizer)

    packed = PackedSamples(tokens, 10, pad_id=0).read(np.array([0]))
    padded = PaddedSamples(tokens, 8, pad_id=0).read(np.array([0, 1]))

    stream = [*first, *second]
    assert packed["labels"][0].tolist() == [stream[t] if marks[t] else IGNORE_INDEX for t in range(1, 11)]
    assert padded["labels"][0, :6].tolist() == [first[t] if marks[t] else IGNORE_INDEX for t in range(1, 7)]
    assert padded["labels"][1, :3].tolist() == [second[t] if marks[7 + t] else IGNORE_INDEX for t in range(1, 4)]


def test_batches_are_as_wide_as_their_longest_sample(tmp_path):
    tokens, tokenizer = token_file(tmp_path, ["a" * length for length in (3, 7, 8, 30)])
    samples = PaddedSamples(tokens, 20, pad_id=tokenizer.pad_id, pad_to_multiple_of=4)

    assert [samples.width(np.array(ids)) for ids in ([0], [0, 1], [1, 2], [3], [FILLER])] == [4, 8, 12, 20, 4]
    assert samples.read(np.array([0]))["input_ids"].shape == (1, 4)
    whole, narrow = samples.read(np.array([0]), 20), samples.read(np.array([0]), 8)
    for name, array in narrow.items():
        assert np.array_equal(array, whole[name][:, :8])


def test_mixed_samples_equal_those_of_their_sources(tmp_path):
    parts = []
    for name, count in (("a", 30), ("b", 5), ("c", 60)):
        tokens, tokenizer = token_file(tmp_path / name, random_texts(random.Random(name), count=count))
        parts.append(PaddedSamples(tokens, 24, pad_id=tokenizer.pad_id, pad_to_multiple_of=1))
    mixed = MixedSamples(parts)
    assert len(mixed) == 95

    ids = np.array([94, 0, 31, FILLER, 29, 34, 35])
    width = mixed.width(ids)
    rows = mixed.read(ids, width)

    own = [(2, 59), (0, 0), (1, 1), (0, FILLER), (0, 29), (1, 4), (2, 0)]
    assert width == max(parts[part].width(np.array([number])) for part, number in own)
    for row, (part, number) in enumerate(own):
        expected = parts[part].read(np.array([number]), width)
        assert all(np.array_equal(rows[name][row], expected[name][0]) for name in expected)
        assert mixed.lengths(ids)[row] == parts[part].lengths(np.array([number]))[0]
