"""Conversations and completions: records of which only a part is trained on.

Each token is marked as trained on or not. In a conversation, the assistant's messages are trained
on, with the end token that closes each of them. In a completion, the text after the prompt and the
end token are.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from meshtrain.data.text.chat_template import ChatTemplate
from meshtrain.data.text.corpus import RecordForm
from meshtrain.data.text.images import TEXT_ALONE, check_no_images, type_name
from meshtrain.data.text.records import Fields, checked_text, checked_weight

ASSISTANT = "assistant"


class TokenizedRecord(NamedTuple):
    """A record as tokens."""

    tokens: np.ndarray
    """(tokens,) int64."""
    trained: np.ndarray
    """(tokens,) bool: whether to train on predicting the token."""
    num_bytes: int
    """The size of the text that was tokenized."""
    weight: float = 1.0
    """How much each of its tokens counts in the loss."""


def build_record_tokenizer(
    form: RecordForm, template: ChatTemplate | None, tokenizer: Tokenizer
) -> Callable[[Fields], Sequence[TokenizedRecord]]:
    """Return a function that tokenizes a record as one document, without the end token after it.

    The function raises ValueError for a bad record.

    Args:
        template: needed for conversations only.
    """
    key = form.weight_key
    tokenize = _tokenizer_of(form, template, tokenizer)
    if key is None:
        return lambda record: [tokenize(record)]
    return lambda record: [tokenize(record)._replace(weight=checked_weight(record.values[key], key, form.keys[key]))]


def _tokenizer_of(
    form: RecordForm, template: ChatTemplate | None, tokenizer: Tokenizer
) -> Callable[[Fields], TokenizedRecord]:
    key, *others = form.keys
    if form.kind == "text":
        return lambda record: _read(record.values, tokenizer, form, key)
    if form.kind == "completion":
        return lambda record: _complete(record.values, tokenizer, form, key, others[0])
    assert template is not None, "the caller loads the template for conversations"
    return lambda record: _converse(record.values, tokenizer, template, form, key)


def _read(record: dict[str, Any], tokenizer: Tokenizer, form: RecordForm, key: str) -> TokenizedRecord:
    text = checked_text(record[key], key, form.keys[key])
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
    return TokenizedRecord(ids, np.ones(len(ids), bool), len(text.encode()))


def _complete(
    record: dict[str, Any], tokenizer: Tokenizer, form: RecordForm, prompt: str, completion: str
) -> TokenizedRecord:
    texts = [checked_text(record[key], key, form.keys[key]) for key in (prompt, completion)]
    return tokenize_completion(texts[0], texts[1], completion, tokenizer)


def tokenize_completion(prompt: str, completion: str, key: str, tokenizer: Tokenizer) -> TokenizedRecord:
    """Tokenize a prompt and what follows it, which is trained on.

    Args:
        key: of the completion, for messages.

    Raises:
        ValueError: if the completion is empty.
    """
    # The two texts are encoded separately. A token across the border would never follow a prompt in
    # use.
    texts = prompt, completion
    prompt_ids, completion_ids = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    if not completion_ids:
        raise ValueError(f'the text of "{key}" is empty: there is nothing to train on')
    is_trained = np.repeat([False, True], [len(prompt_ids), len(completion_ids)])
    return TokenizedRecord(
        np.array([*prompt_ids, *completion_ids], np.int64), is_trained, sum(len(text.encode()) for text in texts)
    )


def _converse(
    record: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate, form: RecordForm, key: str
) -> TokenizedRecord:
    messages = checked_messages(record[key], key, form.keys[key])
    check_has_assistant(messages)
    return tokenize_messages(messages, record.get("tools"), template, tokenizer)


def tokenize_messages(
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    first: int = 0,
) -> TokenizedRecord:
    """Tokenize a conversation, of which the assistant's messages are trained on.

    Args:
        first: number of messages at the start that are not trained on.

    Raises:
        ValueError: if the template refuses it.
    """
    text, spans = _spans(messages, tools, template)
    # Each message of the assistant has a span, in order.
    num_before = sum(message["role"] == ASSISTANT for message in messages[:first])
    if first and len(spans) != sum(message["role"] == ASSISTANT for message in messages):
        raise ValueError("the chat template does not mark each message of the assistant once with {% generation %}")
    encoding = tokenizer.encode(text, add_special_tokens=False)
    starts = np.array([start for start, _ in encoding.offsets], np.int64)
    is_trained = np.zeros(len(starts), bool)
    for start, end in spans[num_before:]:
        is_trained |= (start <= starts) & (starts < end)
    return TokenizedRecord(np.array(encoding.ids, np.int64), is_trained, len(text.encode()))


def check_has_assistant(messages: list[dict[str, Any]]) -> None:
    """Check that the assistant says something.

    Raises:
        ValueError: if it does not.
    """
    if all(message["role"] != ASSISTANT for message in messages):
        raise ValueError(f'no message is of the role "{ASSISTANT}": there is nothing to train on')


def checked_messages(messages: Any, key: str, setting: str) -> list[dict[str, Any]]:
    """Return messages that a template can render.

    Args:
        key: of the record that holds them.
        setting: how the user names that key.

    Raises:
        ValueError: if they are none.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f'the key "{key}" ({setting}) holds {type_name(messages)} and not a list of objects')
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str):
            raise ValueError(f'message {number} has no "role"')
        _check_is_text(message, number)
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f'a text in "{key}" holds half a surrogate pair, which stands for no character') from None
    return messages


def _check_is_text(message: dict[str, Any], number: int) -> None:
    """Check that a message holds no images: many templates would only leave them out.

    Raises:
        ValueError: naming the message and the field.
    """
    content = message.get("content")
    for place, part in enumerate(content if isinstance(content, list) else (), 1):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise ValueError(
                f'message {number} holds {json.dumps(kind)} as part {place} of its "content", and {TEXT_ALONE}'
            )
    try:
        check_no_images(message)
    except ValueError as error:
        raise ValueError(f"message {number}: {error}") from None


def _spans(
    messages: list[dict[str, Any]], tools: list[Any] | None, template: ChatTemplate
) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation as one text, and the (start, end) of each assistant message in it."""
    # Importing transformers takes longer than opening a token file, so it is imported only where it
    # is used.
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
                    f"the chat template renders message {number + 1} differently when others follow, so its "
                    "start and end cannot be found; put {% generation %} and {% endgeneration %} around it in the "
                    "template"
                )
            spans.append((len(before), _end_of_turn(up_to_here, len(before), template.end_token)))
    return text, spans


def _end_of_turn(text: str, start: int, end_token: str | None) -> int:
    """Return where a turn ends: after its end token, where a model stops. Layout may follow it."""
    found = text.rfind(end_token, start) if end_token else -1
    return len(text) if found < 0 or end_token is None else found + len(end_token)
