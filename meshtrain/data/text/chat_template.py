"""The chat template of a tokenizer, which renders a conversation as one text."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.data.cache import compute_identity
from meshtrain.data.text.corpus import Corpus
from meshtrain.data.tokens.tokenizer import TokenizerFiles
from meshtrain.errors import DataError

TEMPLATE_NAME = "chat_template.jinja"
DEFAULT_NAME = "default"
"""The name of the template for conversations without tools, where there are several."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag with which a template marks what the assistant says."""


@dataclass(frozen=True)
class ChatTemplate:
    """The text of a template, and the special tokens that it may use, by role."""

    source: str
    special_tokens: dict[str, str]

    @property
    def end_token(self) -> str | None:
        """The token that closes a turn."""
        return self.special_tokens.get("eos_token")

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks what the assistant says."""
        return GENERATION.search(self.source) is not None

    @property
    def identity(self) -> str:
        """A hash of everything that decides how a conversation is rendered."""
        return compute_identity(self.source, self.special_tokens)


def template_for(corpus: Corpus, tokenizer: TokenizerFiles) -> ChatTemplate | None:
    """Return the chat template that decides the tokens of a corpus; None if none does.

    Records of judged answers need it only if they hold messages.

    Raises:
        DataError: if there are conversations, and no template.
    """
    if corpus.form is None or not corpus.form.may_hold_messages:
        return None
    return _found(tokenizer) if corpus.form.judges_answers else find_chat_template(tokenizer)


def find_chat_template(tokenizer: TokenizerFiles) -> ChatTemplate:
    """Read the chat template that is stored beside a tokenizer.

    Raises:
        DataError: if there is none.
    """
    template = _found(tokenizer)
    if template is None:
        raise DataError(
            f"the tokenizer {tokenizer.directory} has no chat template, which renders messages as text; looked for "
            f'{TEMPLATE_NAME} and "chat_template" in tokenizer_config.json',
            f"take the tokenizer of a chat model, or put a {TEMPLATE_NAME} there",
        )
    return template


def _found(tokenizer: TokenizerFiles) -> ChatTemplate | None:
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = tokenizer.directory / name
        if file.is_file():
            settings |= {key: value for key, value in json.loads(file.read_text(encoding="utf-8")).items() if value}
    source = _source(tokenizer.directory / TEMPLATE_NAME, settings.get("chat_template"))
    if source is None:
        return None
    declared = {role: settings[role] for role in SPECIAL_TOKENS if role in settings}
    tokens = {role: token["content"] if isinstance(token, dict) else token for role, token in declared.items()}
    return ChatTemplate(source, tokens)


def _source(file: Path, declared: Any) -> str | None:
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(declared, list):
        return next((entry["template"] for entry in declared if entry["name"] == DEFAULT_NAME), None)
    return declared if isinstance(declared, str) else None
