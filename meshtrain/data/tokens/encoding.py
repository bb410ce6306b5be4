"""Encoding: chunks of source files become tokens. Each worker process runs one encoder."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from tokenizers import Tokenizer

from meshtrain.data.text.chat_template import ChatTemplate
from meshtrain.data.text.chunks import Chunk
from meshtrain.data.text.conversations import TokenizedRecord, build_record_tokenizer
from meshtrain.data.text.corpus import Corpus, RecordForm
from meshtrain.data.text.preferences import build_answer_tokenizer
from meshtrain.data.text.records import BadRecord, Fields, parse, parse_fields
from meshtrain.data.tokens.cutting import Cutter, TooLongError

BATCH_CHARACTERS = 1 << 17
"""The size of a batch to encode. A larger one leaves the caches of a core, and is slower."""


@dataclass(frozen=True)
class EncodedBlock:
    """The documents of consecutive chunks as tokens, without end tokens."""

    tokens: np.ndarray
    """(tokens,): all texts one after another."""
    lengths: np.ndarray
    """(texts,) int64: tokens of each text. A text is a document or a piece of one."""
    num_bytes: np.ndarray
    """(texts,) int64: bytes of each text."""
    ends_document: np.ndarray
    """(texts,) bool."""
    problems: list[tuple[int, BadRecord]]
    """Bad records, each with the number of texts before it."""
    trained: np.ndarray | None = None
    """(tokens,) bool: whether to train on predicting the token; None: all tokens are."""
    weights: np.ndarray | None = None
    """(texts,) float32: how much the tokens of a text, which is a document, count in the loss;
    None: all count the same."""

    def select(self, chosen: np.ndarray) -> Self:
        """Return the texts where `chosen`, (texts,) bool, is true, without the problems."""
        chosen_tokens = np.repeat(chosen, self.lengths)
        return type(self)(
            tokens=self.tokens[chosen_tokens],
            lengths=self.lengths[chosen],
            num_bytes=self.num_bytes[chosen],
            ends_document=self.ends_document[chosen],
            problems=[],
            trained=None if self.trained is None else self.trained[chosen_tokens],
            weights=None if self.weights is None else self.weights[chosen],
        )


class Encoder:
    """Turns chunks into tokens.

    Args:
        tokenizer: loaded without truncation and padding.
        token_type: the type of the tokens, wide enough for the vocabulary.
        text_key: see `Corpus`.
        text_key_setting: how the user names it, for messages.
    """

    def __init__(self, tokenizer: Tokenizer, token_type: np.dtype, text_key: str, text_key_setting: str) -> None:
        self._tokenizer = tokenizer
        self._token_type = token_type
        self._text_key, self._text_key_setting = text_key, text_key_setting
        self._cutter = Cutter(tokenizer)

    def encode(self, chunks: Iterable[Chunk]) -> EncodedBlock:
        """Encode all texts of chunks, in order, without special tokens."""
        texts = _Texts(self._tokenizer, self._token_type)
        for chunk in chunks:
            for record in parse(chunk, self._text_key, setting=self._text_key_setting):
                if isinstance(record, BadRecord):
                    texts.problems.append((len(texts.lengths), record))
                    continue
                try:
                    pieces = list(self._cutter.pieces(record.text))
                except TooLongError as error:
                    problem = BadRecord(f"{record.location}: {error}", is_damage=False)
                    texts.problems.append((len(texts.lengths), problem))
                else:
                    texts.add(pieces, ends_document=record.ends_document)
        return texts.encoded()


class RecordEncoder:
    """Turns chunks of conversations, completions or judged answers into tokens with marks.

    Args:
        tokenize: record -> tokens and marks of its documents; raises ValueError for a bad record.
        form: of the records.
    """

    def __init__(
        self, tokenize: Callable[[Fields], Sequence[TokenizedRecord]], token_type: np.dtype, form: RecordForm
    ) -> None:
        self._tokenize, self._token_type, self._form = tokenize, token_type, form

    def encode(self, chunks: Iterable[Chunk]) -> EncodedBlock:
        """Encode all records of chunks, in order."""
        found: list[TokenizedRecord] = []
        problems: list[tuple[int, BadRecord]] = []
        for chunk in chunks:
            for record in parse_fields(chunk, self._form.keys):
                if isinstance(record, BadRecord):
                    problems.append((len(found), record))
                    continue
                try:
                    found += self._tokenize(record)
                except ValueError as error:
                    problems.append((len(found), BadRecord(f"{record.location}: {error}", is_damage=False)))
        return EncodedBlock(
            tokens=np.concatenate([np.zeros(0, np.int64), *(one.tokens for one in found)]).astype(self._token_type),
            lengths=np.array([len(one.tokens) for one in found], np.int64),
            num_bytes=np.array([one.num_bytes for one in found], np.int64),
            ends_document=np.ones(len(found), np.bool_),
            problems=problems,
            trained=np.concatenate([np.zeros(0, np.bool_), *(one.trained for one in found)]),
            weights=None if self._form.weight_key is None else np.array([one.weight for one in found], np.float32),
        )


@dataclass(frozen=True)
class Task:
    """What another process needs to build its encoder."""

    tokenizer: str
    """The content of its tokenizer.json."""
    token_type: np.dtype
    text_key: str
    text_key_setting: str
    """How the user names it, for messages."""
    form: RecordForm | None = None
    template: ChatTemplate | None = None

    def build(self) -> Encoder | RecordEncoder:
        """Build the encoder."""
        tokenizer = Tokenizer.from_str(self.tokenizer)
        if self.form is None:
            return Encoder(tokenizer, self.token_type, self.text_key, self.text_key_setting)
        build = build_answer_tokenizer if self.form.judges_answers else build_record_tokenizer
        return RecordEncoder(build(self.form, self.template, tokenizer), self.token_type, self.form)


def build_task(corpus: Corpus, tokenizer: Tokenizer, token_type: np.dtype, template: ChatTemplate | None) -> Task:
    """Return the task of the processes that encode a corpus."""
    return Task(tokenizer.to_str(), token_type, corpus.text_key, corpus.settings.text_key, corpus.form, template)


@dataclass
class _Texts:
    """Collects texts, and encodes them in batches."""

    tokenizer: Tokenizer
    token_type: np.dtype
    lengths: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    ends_document: list[bool] = field(default_factory=list)
    problems: list[tuple[int, BadRecord]] = field(default_factory=list)
    _tokens: list[np.ndarray] = field(default_factory=list)
    _waiting: list[tuple[int, str]] = field(default_factory=list)
    _waiting_characters: int = 0

    def add(self, pieces: list[str], *, ends_document: bool) -> None:
        number = len(self.lengths)
        self.lengths.append(0)
        self.num_bytes.append(sum(len(piece) if piece.isascii() else len(piece.encode()) for piece in pieces))
        self.ends_document.append(ends_document)
        for piece in pieces:
            self._waiting.append((number, piece))
            self._waiting_characters += len(piece)
            if self._waiting_characters >= BATCH_CHARACTERS:
                self._encode_waiting()

    def encoded(self) -> EncodedBlock:
        self._encode_waiting()
        return EncodedBlock(
            tokens=np.concatenate([np.zeros(0, self.token_type), *self._tokens]),
            lengths=np.array(self.lengths, np.int64),
            num_bytes=np.array(self.num_bytes, np.int64),
            ends_document=np.array(self.ends_document, np.bool_),
            problems=self.problems,
        )

    def _encode_waiting(self) -> None:
        pieces = [piece for _, piece in self._waiting]
        encodings = self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        for (number, _), encoding in zip(self._waiting, encodings, strict=True):
            tokens = np.array(encoding.ids, self.token_type)
            self.lengths[number] += len(tokens)
            self._tokens.append(tokens)
        self._waiting, self._waiting_characters = [], 0
