"""Judged answers: which tokens are trained on, how rows are paired, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from meshtrain.config.data import IGNORE_INDEX, DataConfig, MixedSourceConfig
from meshtrain.data.inspection import inspect_run
from meshtrain.data.prepare import PreparedData, prepare_data
from meshtrain.data.samples.dataset import build_dataset, train_samples
from meshtrain.data.samples.order import FILLER
from meshtrain.data.samples.rows import in_rows
from meshtrain.errors import DataError
from tests.data.test_conversations import CHATML, MARKED, TALK, configure

PAIR = {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "five"}
PAIRS = [PAIR, {"prompt": "", "chosen": "yes", "rejected": "no"}, {"prompt": "Hi", "chosen": "Hello", "rejected": "?"}]
JUDGED = [
    {"prompt": "ab", "completion": "cd", "label": True},
    {"prompt": "e", "completion": "f", "label": False},
    {"prompt": "gh", "completion": "ijk", "label": True},
]
ANSWERS = {"prompt": TALK[:3], "chosen": TALK[3:], "rejected": [{"role": "assistant", "content": "What?"}]}


def prepare(directory: Path, records: list[Any], template: str | None = None, **options: Any) -> PreparedData:
    return prepare_data(configure(directory, records, template, **{"format": "preference", **options}))


def texts(directory: Path, arrays: dict[str, np.ndarray], prefix: str = "") -> list[tuple[str, str]]:
    """Return the tokens of each row, and those of them that are predicted, as text."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    found = []
    for ids, mask, labels in zip(
        *(arrays[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "labels")), strict=True
    ):
        kept = labels[labels != IGNORE_INDEX]
        found.append(
            tuple(tokenizer.decode(it.tolist(), skip_special_tokens=False) for it in (ids[mask.astype(bool)], kept))
        )
    return found


def rows_of(directory: Path, prepared: PreparedData, ids: list[int]) -> list[tuple[str, str]]:
    return texts(directory, in_rows(train_samples(prepared).read(np.array(ids))))


def test_answers_of_a_pair_follow_each_other(tmp_path: Path) -> None:
    found = rows_of(tmp_path, prepare(tmp_path, PAIRS), [2, 0])
    assert found == [
        ("HiHello<|im_end|>", "Hello<|im_end|>"),
        ("Hi?<|im_end|>", "?<|im_end|>"),
        ("2 + 2 = 4<|im_end|>", "4<|im_end|>"),
        ("2 + 2 = five<|im_end|>", "five<|im_end|>"),
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_messages_before_the_answer_are_not_trained_on(tmp_path: Path, template: str) -> None:
    (_, chosen), (text, rejected) = rows_of(tmp_path, prepare(tmp_path, [ANSWERS], template), [0])
    assert (chosen, rejected) == ("Bye<|im_end|>", "What?<|im_end|>")
    assert "A grid of processes" in text


def test_single_answers_have_a_judgement_and_a_mismatched_row(tmp_path: Path) -> None:
    samples = train_samples(prepare(tmp_path, JUDGED, format="unpaired_preference"))
    arrays = samples.read(np.array([1, 0, FILLER, 2]))
    assert arrays["desirable"].tolist() == [False, True, False, True]
    assert texts(tmp_path, arrays)[:2] == [("ef<|im_end|>", "f<|im_end|>"), ("abcd<|im_end|>", "cd<|im_end|>")]
    mismatched = texts(tmp_path, arrays, "mismatched_")
    assert mismatched[:2] == [("ecd<|im_end|>", "cd<|im_end|>"), ("abijk<|im_end|>", "ijk<|im_end|>")]
    assert mismatched[3] == ("ghf<|im_end|>", "f<|im_end|>")
    assert (arrays["mismatched_labels"][2] == IGNORE_INDEX).all()


def test_width_is_that_of_the_longest_row(tmp_path: Path) -> None:
    samples = train_samples(prepare(tmp_path, JUDGED, format="unpaired_preference", pad_to_multiple_of=1))
    # "ab" with "ijk": as long as "gh" with it.
    assert samples.width(np.array([0])) == 6
    assert samples.width(np.array([1])) == 4
    assert samples.lengths(np.array([1, 2])).tolist() == [3, 6]
    pairs = train_samples(prepare(tmp_path, PAIRS, pad_to_multiple_of=1))
    assert pairs.width(np.array([0, 1])) == 13
    assert pairs.lengths(np.array([0, 1, FILLER])).tolist() == [13, 4, 1]


def test_pairs_of_a_mixture_stay_together(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    first, second = (configure(tmp_path / "one", PAIRS, None, format="preference"), tmp_path / "two.jsonl")
    second.write_text(json.dumps({"prompt": "x", "chosen": "y", "rejected": "z"}) + "\n")
    sources = {
        name: MixedSourceConfig(train=train, format="preference")
        for name, train in (("first", first.train), ("second", [str(second)]))
    }
    config = DataConfig(
        sources=sources,
        form="padded",
        sequence_length=32,
        tokenizer=first.tokenizer,
        cache_directory=first.cache_directory,
    )
    found = rows_of(tmp_path / "one", prepare_data(config), [3, 0])
    assert [row for row, _ in found] == [
        "xy<|im_end|>",
        "xz<|im_end|>",
        "2 + 2 = 4<|im_end|>",
        "2 + 2 = five<|im_end|>",
    ]


def test_pairs_are_held_out_whole(tmp_path: Path) -> None:
    records = [{"prompt": f"{n:02}", "chosen": "+", "rejected": "-"} for n in range(40)]
    prepared = prepare(tmp_path, records, validation=0.3)
    dataset = build_dataset(prepared, global_batch_size=2, seed=0)
    held_out, _ = dataset.validation["data"]
    parts = []
    for samples in (dataset.samples, held_out):
        found = texts(tmp_path, in_rows(samples.read(np.arange(len(samples)))))
        numbers = [row[:2] for row, _ in found]
        assert numbers[::2] == numbers[1::2]
        assert {row[2] for row, _ in found[::2]} == {"+"}
        parts.append(set(numbers))
    assert len(parts[0]) + len(parts[1]) == 40
    assert len(parts[1]) > 4


def test_inspection_shows_both_rows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = configure(tmp_path, PAIRS, None, format="preference")
    inspect_run(config, part="train", first=0, count=1, name="run.toml")
    shown = capsys.readouterr().out
    assert "Sample 0 of 3, chosen: 10 tokens" in shown
    assert "Sample 0 of 3, rejected: 13 tokens" in shown
    inspect_run(
        configure(tmp_path, JUDGED, None, format="unpaired_preference"), part="train", first=1, count=1, name="run.toml"
    )
    assert "Sample 1 of 3, undesirable: 3 tokens" in capsys.readouterr().out


BAD = [
    ("preference", {**PAIR, "chosen": ""}, 'the text of "chosen" is empty: there is nothing to train on'),
    ("preference", {**PAIR, "rejected": 5}, 'the key "rejected" (data.rejected_key) holds a number and not text'),
    ("preference", {"prompt": "a", "chosen": "b"}, 'no key "rejected" (data.rejected_key)'),
    (
        "preference",
        {**PAIR, "chosen": TALK},
        'the key "prompt" holds text and the key "chosen" a list, where both are texts, or both are lists of',
    ),
    ("preference", {**ANSWERS, "chosen": TALK[:1]}, 'no message is of the role "assistant"'),
    (
        "unpaired_preference",
        {**JUDGED[0], "label": "good"},
        'the key "label" (data.label_key) holds text and not true or false',
    ),
    ("unpaired_preference", {**JUDGED[0], "prompt": ""}, 'the text of "prompt" is empty'),
    (
        "preference",
        {**PAIR, "prompt": "", "chosen": "yes", "rejected": "x"},
        '"prompt" and "rejected" are one token together, of which none can be predicted',
    ),
]


@pytest.mark.parametrize(("kind", "record", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_records_are_named(tmp_path: Path, kind: str, record: dict, message: str) -> None:
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, [record], CHATML, format=kind)
    assert message in str(caught.value)
    assert "line 1: " in str(caught.value)


def test_messages_need_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds messages, and the tokenizer has no chat template"):
        prepare(tmp_path, [ANSWERS])


def test_answers_without_a_token_are_refused(tmp_path: Path) -> None:
    template = "{% for it in messages %}|{% if it['role'] == 'assistant' %}{% generation %}{{ it['content'] }}"
    template += "{% endgeneration %}{% else %}{{ it['content'] }}{% endif %}{% endfor %}"
    silent = {**ANSWERS, "rejected": [{"role": "assistant", "content": ""}]}
    with pytest.raises(DataError, match=r'the answer in "rejected" has no tokens: there is nothing to train on'):
        prepare(tmp_path, [silent], template)


def test_prompts_that_leave_no_room_for_an_answer_are_refused(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, PAIRS, sequence_length=8)
    with pytest.raises(DataError, match=r"data.train: 2 of 6 prompts fill data.sequence_length = 8 tokens, so nothing"):
        build_dataset(prepared, global_batch_size=1, seed=0)
    build_dataset(prepare(tmp_path, PAIRS, sequence_length=9), global_batch_size=1, seed=0)


def test_keys_of_a_record_differ() -> None:
    with pytest.raises(ValidationError, match='`prompt_key` and `rejected_key` are both "prompt"'):
        DataConfig(format="preference", rejected_key="prompt")
