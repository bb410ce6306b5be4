"""Conversations and completions: exactly the tokens of the assistant are trained on."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from meshtrain.config.data import IGNORE_INDEX, DataConfig, MixedSourceConfig, TokenizerConfig
from meshtrain.data.cache import Cache
from meshtrain.data.prepare import prepare_data
from meshtrain.data.samples.dataset import train_samples
from meshtrain.data.tokens.token_file import TokenFile
from meshtrain.errors import DataError
from tests.data.corpora import byte_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}[{{ message['role'] }}]{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Templates of reasoning models leave out the thoughts of earlier turns.
FORGETFUL = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' and not loop.last %}"
    "{{ message['content'].split('</think>')[-1] }}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "What is a mesh?"},
    {"role": "assistant", "content": "A grid of processes. ✓"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye"},
]


def tokenizer_with(directory: Path, template: str | None) -> Path:
    """Write a byte-level tokenizer with two chat tokens and a template."""
    files = byte_tokenizer(Cache(directory / "cache"))
    tokenizer = Tokenizer.from_file(str(files.directory / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def configure(directory: Path, records: list[dict], template: str | None, **options) -> DataConfig:
    path = directory / "talk.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    defaults = {
        "train": [str(path)],
        "format": "chat",
        "form": "padded",
        "sequence_length": 400,
        "tokenizer": TokenizerConfig(path=str(tokenizer_with(directory, template))),
        "cache_directory": str(directory / "cache"),
    }
    return DataConfig(**{**defaults, **options})


def trained_runs(file: TokenFile, directory: Path, document: int = 0) -> list[str]:
    """Return the runs of tokens of a document that are trained on, as text."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    start, end = file.offsets[document : document + 2]
    marks = np.array(file.trained[start:end])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]])))
    return [
        tokenizer.decode(file.tokens[start:end][first:last].tolist(), skip_special_tokens=False)
        for first, last in zip(edges[::2], edges[1::2], strict=True)
    ]


@pytest.mark.parametrize(
    ("template", "runs"),
    [
        (CHATML, ["A grid of processes. ✓<|im_end|>", "Bye<|im_end|>"]),
        (MARKED, ["A grid of processes. ✓<|im_end|>", "Bye<|im_end|>"]),
        # A template without end tokens: the end of the document is trained on.
        (PLAIN, ["A grid of processes. ✓\n", "Bye\n<|im_end|>"]),
    ],
    ids=["chatml", "marked", "plain"],
)
def test_only_the_assistant_messages_are_trained_on(tmp_path, template, runs):
    data = prepare_data(configure(tmp_path, [{"messages": TALK}, {"messages": TALK[:2]}], template))
    file = data.sources[0].train

    assert trained_runs(file, tmp_path) == runs
    assert len(trained_runs(file, tmp_path, 1)) == 1
    assert file.counts.trained_tokens == int(file.trained.sum())
    stock = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = stock.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    start, end = file.offsets[:2]
    assert file.tokens[start:end].tolist() == [*ids, data.tokenizer.end_id]


def test_marks_equal_those_of_transformers(tmp_path):
    data = prepare_data(configure(tmp_path, [{"messages": TALK}], MARKED))
    stock = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenized = stock.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)

    trained = np.array(data.sources[0].train.trained[:-1]).tolist()
    assert trained == [bool(mark) for mark in tokenized["assistant_masks"]]


def test_labels_follow_the_marks(tmp_path):
    data = prepare_data(configure(tmp_path, [{"messages": TALK}] * 3, CHATML))
    rows = train_samples(data).read(np.array([0]))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    labels = rows["labels"][0]

    assert tokenizer.decode(labels[labels != IGNORE_INDEX].tolist(), skip_special_tokens=False) == (
        "A grid of processes. ✓<|im_end|>Bye<|im_end|>"
    )


def test_completions_are_trained_on_with_their_end_token(tmp_path):
    records = [{"question": "2 + 2 = ", "answer": "4"}, {"question": "", "answer": "yes"}]
    config = configure(tmp_path, records, None, format="completion", prompt_key="question", completion_key="answer")
    file = prepare_data(config).sources[0].train

    assert [trained_runs(file, tmp_path, document) for document in (0, 1)] == [["4<|im_end|>"], ["yes<|im_end|>"]]
    assert file.counts.text_bytes == len("2 + 2 = 4yes")


@pytest.mark.parametrize(
    ("record", "template", "problem"),
    [
        ({"text": "x"}, CHATML, 'no key "messages" (data.messages_key); the keys are "text"'),
        ({"messages": "x"}, CHATML, 'the key "messages" (data.messages_key) holds text and not a list of objects'),
        ({"messages": [{"content": "x"}]}, CHATML, 'message 1 has no "role"'),
        ({"messages": TALK[:1]}, CHATML, 'no message is of the role "assistant": there is nothing to train on'),
        (
            {"messages": [{"role": "assistant", "content": "\ud800"}]},
            CHATML,
            'a text in "messages" holds half a surrogate pair, which stands for no character',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}, TALK[1]]},
            CHATML,
            'message 1 holds "image" as part 2 of its "content", and meshtrain trains on text alone',
        ),
        (
            {"messages": [{**TALK[0], "images": ["x.png"]}, TALK[1]]},
            CHATML,
            'message 1: the key "images" holds a list beside the text, and meshtrain trains on text alone',
        ),
        (
            {"messages": TALK[:2], "image": "x.png"},
            CHATML,
            'the key "image" holds "x.png" beside the text, and meshtrain trains on text alone',
        ),
        (
            {"messages": [{"role": "system", "content": "x"}, *TALK]},
            STRICT,
            "the chat template refuses it: no system",
        ),
        (
            {"messages": [TALK[0], {"role": "assistant", "content": "hm</think>so"}, *TALK]},
            FORGETFUL,
            "the chat template renders message 2 differently when others follow, so its start and end cannot "
            "be found; put {% generation %} and {% endgeneration %} around it in the template",
        ),
    ],
    ids=["key", "type", "role", "nobody", "surrogate", "part", "images", "image", "refused", "forgetful"],
)
def test_record_with_nothing_to_train_on_is_reported(tmp_path, record, template, problem):
    good = {"messages": TALK[:2]}
    config = configure(tmp_path, [good, record], template)
    with pytest.raises(DataError) as caught:
        prepare_data(config)
    assert caught.value.lines == (
        f'{tmp_path}/talk.jsonl, line 2: {problem}; fix it, or leave such records out with data.on_bad_record = "skip"',
    )

    counts = prepare_data(config.model_copy(update={"on_bad_record": "skip"})).sources[0].train.counts
    assert (counts.documents, counts.skipped_records) == (1, 1)


def test_the_key_of_one_of_several_sources_is_named(tmp_path):
    config = configure(tmp_path, [{"messages": "x"}], CHATML)
    source = MixedSourceConfig(train=config.train, format="chat")
    mixed = DataConfig(sources={"one": source}, tokenizer=config.tokenizer, cache_directory=config.cache_directory)
    with pytest.raises(DataError, match=r'the key "messages" \(data\.sources\.one\.messages_key\) holds text'):
        prepare_data(mixed)


def test_empty_completion_is_reported(tmp_path):
    config = configure(tmp_path, [{"prompt": "a", "completion": ""}], None, format="completion")
    with pytest.raises(
        DataError, match=r'line 1: the text of "completion" is empty: there is nothing to train on; fix'
    ):
        prepare_data(config)


def test_chat_needs_a_template_and_a_tokenizer_needs_text(tmp_path):
    with pytest.raises(DataError, match=r"has no chat template, which renders messages as text; looked for chat_templ"):
        prepare_data(configure(tmp_path, [{"messages": TALK}], None))
    with pytest.raises(DataError, match=r"a tokenizer is trained on texts, and data.format is not text; train one on"):
        prepare_data(configure(tmp_path, [{"messages": TALK}], CHATML, tokenizer=TokenizerConfig(vocab_size=300)))


def test_conversations_are_read_from_a_table(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"id": [1, 2], "messages": [TALK, TALK[:2]]}), tmp_path / "talk.parquet")
    lines = configure(tmp_path, [{"messages": TALK}, {"messages": TALK[:2]}], CHATML)
    table = lines.model_copy(update={"train": [str(tmp_path / "talk.parquet")]})

    first, second = (prepare_data(config).sources[0].train for config in (lines, table))

    assert np.array_equal(first.tokens, second.tokens)
    assert np.array_equal(first.trained, second.trained)


def test_bytes_in_a_table_are_not_taken_for_text(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "talk.parquet"
    config = configure(tmp_path, [], CHATML, format="completion").model_copy(update={"train": [str(path)]})
    parquet.write_table(arrow.table({"prompt": [b"2 + 2 = "], "completion": ["4"]}), path)
    with pytest.raises(DataError, match=r'the column "prompt" \(data.prompt_key\) holds binary and not text; fix it'):
        prepare_data(config)

    parquet.write_table(arrow.table({"messages": [[{"role": "assistant", "content": b"4"}]]}), path)
    with pytest.raises(DataError, match=r'the column "messages" \(data.messages_key\) holds list<.*and not text; fix'):
        prepare_data(config.model_copy(update={"format": "chat"}))


def test_column_of_images_is_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "talk.parquet"
    config = configure(tmp_path, [], CHATML).model_copy(update={"train": [str(path)]})
    pictures = [[{"bytes": b"PNG", "path": "x.png"}]]
    parquet.write_table(arrow.table({"messages": [TALK], "text": ["x"], "images": pictures}), path)
    for changes in ({}, {"format": "text", "form": "packed"}):
        with pytest.raises(DataError, match=r'talk.parquet: the column "images" holds list<.* beside the text, and '):
            prepare_data(config.model_copy(update=changes))


def test_row_with_bad_utf8_costs_one_row(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "talk.parquet"
    ends = b"".join(end.to_bytes(4, "little") for end in (0, 3, 8, 11))
    prompts = arrow.StringArray.from_buffers(3, arrow.py_buffer(ends), arrow.py_buffer(b"onecaf\xe9 two"))
    parquet.write_table(arrow.table({"prompt": prompts, "completion": ["1", "2", "3"]}), path)
    config = configure(tmp_path, [], CHATML, format="completion").model_copy(update={"train": [str(path)]})
    with pytest.raises(DataError, match=r"talk.parquet, row 2: not UTF-8 text \(byte 4 of a text: invalid "):
        prepare_data(config)

    counts = prepare_data(config.model_copy(update={"on_bad_record": "skip"})).sources[0].train.counts
    assert (counts.documents, counts.skipped_records) == (2, 1)


def test_another_template_gives_another_identity(tmp_path):
    first = prepare_data(configure(tmp_path, [{"messages": TALK}], CHATML))
    second = prepare_data(configure(tmp_path, [{"messages": TALK}], MARKED))

    assert first.identity != second.identity


def test_conversations_and_texts_are_mixed(tmp_path):
    (tmp_path / "a.txt").write_text("plain text " * 50)
    config = configure(tmp_path, [{"messages": TALK}] * 4, CHATML)
    sources = {
        "talk": MixedSourceConfig(train=config.train, format="chat"),
        "text": MixedSourceConfig(train=[str(tmp_path / "a.txt")]),
    }
    mixed = DataConfig(
        sources=sources,
        form="packed",
        sequence_length=64,
        tokenizer=config.tokenizer,
        cache_directory=config.cache_directory,
    )
    data = prepare_data(mixed)
    samples = train_samples(data)

    of_talk, of_text = samples.read(np.array([0])), samples.read(np.array([len(samples) - 1]))

    assert (of_text["labels"] != IGNORE_INDEX).all()
    assert 0 < (of_talk["labels"] != IGNORE_INDEX).sum() < 64


def test_template_with_the_date_cannot_be_streamed(tmp_path):
    config = configure(tmp_path, [{"messages": TALK}], "{{ strftime_now('%d') }}" + CHATML, streaming=True)
    with pytest.raises(DataError, match=r"writes the current date \(strftime_now\), so a stream that resumes"):
        prepare_data(config)
