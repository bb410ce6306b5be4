"""Answers that people have judged: each is tokenized with its prompt, as a document.

The answer is trained on with the end token after it, and the prompt is not. The first token of a
document is never predicted, so its mark is free: for a single answer, it says whether the answer is
desirable.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from meshtrain.data.text.chat_template import ChatTemplate
from meshtrain.data.text.conversations import (
    TokenizedRecord,
    check_has_assistant,
    checked_messages,
    tokenize_completion,
    tokenize_messages,
)
from meshtrain.data.text.corpus import RecordForm
from meshtrain.data.text.images import type_name
from meshtrain.data.text.records import Fields, checked_text

FIRST = 0
"""Index of the token whose mark is free."""


def build_answer_tokenizer(
    form: RecordForm, template: ChatTemplate | None, tokenizer: Tokenizer
) -> Callable[[Fields], Sequence[TokenizedRecord]]:
    """Return a function that tokenizes a record: the chosen answer before the rejected one.

    The function raises ValueError for a bad record.

    Args:
        template: for messages; None: the tokenizer has none.
    """
    one = _Answers(form.keys, template, tokenizer)
    if form.kind == "preference":
        return lambda record: one.of_pair(record.values, *form.keys)
    return lambda record: [one.judged(record.values, *form.keys)]


class _Answers:
    """Tokenizes prompts with their answers.

    Args:
        settings: key of a record -> setting that names it.
    """

    def __init__(self, settings: Mapping[str, str], template: ChatTemplate | None, tokenizer: Tokenizer) -> None:
        self._settings, self._template, self._tokenizer = settings, template, tokenizer

    def of_pair(self, record: dict[str, Any], prompt: str, chosen: str, rejected: str) -> list[TokenizedRecord]:
        """Return both answers of a record, of which the arguments are the keys."""
        return [self._answer(record, prompt, answer) for answer in (chosen, rejected)]

    def judged(self, record: dict[str, Any], prompt: str, answer: str, label: str) -> TokenizedRecord:
        """Return a single answer, whose first mark is whether it is desirable."""
        found, is_desirable = self._answer(record, prompt, answer), record[label]
        if not isinstance(is_desirable, bool):
            raise ValueError(
                f'the key "{label}" ({self._settings[label]}) holds {type_name(is_desirable)} and not true or false'
            )
        if found.trained[FIRST]:
            raise ValueError(f'the text of "{prompt}" is empty, so an answer that does not belong to it is no worse')
        found.trained[FIRST] = is_desirable
        return found

    def _answer(self, record: dict[str, Any], prompt: str, answer: str) -> TokenizedRecord:
        if isinstance(record[prompt], list) and isinstance(record[answer], list):
            found = self._messages(record, prompt, answer)
        elif isinstance(record[prompt], list) or isinstance(record[answer], list):
            raise ValueError(
                f'the key "{prompt}" holds {type_name(record[prompt])} and the key "{answer}" '
                f"{type_name(record[answer])}, where both are texts, or both are lists of messages"
            )
        else:
            texts = [checked_text(record[key], key, self._settings[key]) for key in (prompt, answer)]
            found = tokenize_completion(texts[0], texts[1], answer, self._tokenizer)
        if len(found.tokens) < 2:
            raise ValueError(f'"{prompt}" and "{answer}" are one token together, of which none can be predicted')
        return found

    def _messages(self, record: dict[str, Any], prompt: str, answer: str) -> TokenizedRecord:
        if self._template is None:
            raise ValueError(
                f'the key "{prompt}" ({self._settings[prompt]}) holds messages, and the tokenizer has no chat template'
            )
        before, after = (checked_messages(record[key], key, self._settings[key]) for key in (prompt, answer))
        check_has_assistant(after)
        found = tokenize_messages([*before, *after], record.get("tools"), self._template, self._tokenizer, len(before))
        if not np.any(found.trained[1:]):
            raise ValueError(f'the answer in "{answer}" has no tokens: there is nothing to train on')
        return found
