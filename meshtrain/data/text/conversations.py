"""Conversations and completions: records of which a part only is to be learnt.

What is trained on is marked token by token. Of a conversation it is what the assistant says, up to the end token that
closes its turn; of a completion, what follows the prompt, and the end token.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from meshtrain.data.text.chat_template import ChatTemplate
from meshtrain.data.text.corpus import RecordForm
from meshtrain.data.text.records import Fields, checked_text, type_name

ASSISTANT = "assistant"


class TokenizedRecord(NamedTuple):
    """A record as tokens."""

    tokens: np.ndarray
    """(tokens,) int64."""
    trained: np.ndarray
    """(tokens,) bool: whether to train on foretelling the token."""
    num_bytes: int
    """Of the text that was tokenized."""


def build_record_tokenizer(
    form: RecordForm, template: ChatTemplate | None, tokenizer: Tokenizer
) -> Callable[[Fields], TokenizedRecord]:
    """Return what turns a record into tokens, without the end token behind it; it raises ValueError for a bad one."""
    if form.kind == "completion":
        prompt, completion = form.keys
        return lambda record: _complete(record.values, tokenizer, form, prompt, completion)
    assert template is not None, "tokenizing has asked for it"
    return lambda record: _converse(record.values, tokenizer, template, form)


def _complete(
    record: dict[str, Any], tokenizer: Tokenizer, form: RecordForm, prompt: str, completion: str
) -> TokenizedRecord:
    # Each on its own: a token over the border would be one that never follows the prompt when the model is used.
    texts = [checked_text(record[key], key, form.keys[key]) for key in (prompt, completion)]
    given, learnt = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    if not learnt:
        raise ValueError(f'the text of "{completion}" is empty: there is nothing to learn')
    marks = np.repeat([False, True], [len(given), len(learnt)])
    return TokenizedRecord(np.array([*given, *learnt], np.int64), marks, sum(len(text.encode()) for text in texts))


def _converse(
    record: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate, form: RecordForm
) -> TokenizedRecord:
    ((key, said_by),) = form.keys.items()
    messages = _checked_messages(record[key], key, said_by)
    text, spans = _spans(messages, record.get("tools"), template)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    starts = np.array([start for start, _ in encoding.offsets], np.int64)
    is_trained = np.zeros(len(starts), bool)
    for start, end in spans:
        is_trained |= (start <= starts) & (starts < end)
    return TokenizedRecord(np.array(encoding.ids, np.int64), is_trained, len(text.encode()))


def _checked_messages(messages: Any, key: str, said_by: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f'the key "{key}" ({said_by}) holds {type_name(messages)} and not a list of objects')
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str):
            raise ValueError(f'message {number} has no "role"')
    if all(message["role"] != ASSISTANT for message in messages):
        raise ValueError(f'no message is of the role "{ASSISTANT}": there is nothing to learn')
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f'a text in "{key}" holds half a surrogate pair, which stands for no character') from None
    return messages


def _spans(
    messages: list[dict[str, Any]], tools: list[Any] | None, template: ChatTemplate
) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation as one text, and where the assistant speaks in it."""
    # transformers takes longer to load than a token file to be opened.
    from jinja2 import TemplateError  # noqa: PLC0415
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

    def render(shown: list[dict[str, Any]], **options: bool) -> tuple[str, list[Any]]:
        arguments: dict[str, Any] = {"chat_template": template.source, **template.special_tokens, **options}
        try:
            texts, marks = render_jinja_template([shown], tools, **arguments)  # type: ignore[str-unpack]
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ValueError(f"the chat template refuses it: {' '.join(str(error).split())}") from error
        return texts[0], list(marks)

    if template.marks_generation:
        text, (marks,) = render(messages, return_assistant_tokens_mask=True)
        return text, [(start, end) for start, end in marks]
    text, _ = render(messages)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before, _ = render(messages[:number], add_generation_prompt=True)
            up_to_here, _ = render(messages[: number + 1])
            if not (up_to_here.startswith(before) and text.startswith(up_to_here)):
                raise ValueError(
                    f"the chat template writes message {number + 1} in another way when others follow, so where it "
                    "begins and ends cannot be told; put {% generation %} and {% endgeneration %} around it in the "
                    "template"
                )
            spans.append((len(before), _end_of_turn(up_to_here, len(before), template.end_token)))
    return text, spans


def _end_of_turn(text: str, start: int, end_token: str | None) -> int:
    """Return where a turn ends: behind its end token, where a model stops; what is behind that is layout."""
    found = text.rfind(end_token, start) if end_token else -1
    return len(text) if found < 0 or end_token is None else found + len(end_token)
