"""Inspecting: a sample as the model sees it, or a document of a token file, is decoded and marked.

Text that is trained on is plain (green on a terminal). Text that is only read stands between ⟦ and
⟧ (dim on a terminal).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from meshtrain import console
from meshtrain.config.data import IGNORE_INDEX, DataConfig
from meshtrain.data.cache import Cache
from meshtrain.data.prepare import prepare_data
from meshtrain.data.samples.answers import CHOSEN, DESIRABLE, REJECTED
from meshtrain.data.samples.dataset import train_samples, validation_samples
from meshtrain.data.samples.rows import Arrays, in_rows
from meshtrain.data.samples.weights import tokens_of_labels
from meshtrain.data.tokens.token_file import TRAIN
from meshtrain.data.tokens.tokenized_source import holds_several, is_tokenized, open_token_file
from meshtrain.data.tokens.tokenizer import TokenizerFiles, find_tokenizer
from meshtrain.errors import DataError

COLORS = {True: "green", False: "dim"}
SPECIAL_STYLE = "bold cyan"
BORDER_STYLE = "bold yellow"
READ_ONLY_MARKS = "⟦", "⟧"
ROWS = {CHOSEN: "chosen", REJECTED: "rejected"}
PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Control character -> its printable symbol.

The characters would move the cursor or change colors.
"""


class Span(NamedTuple):
    """Consecutive tokens of one document that are either all trained on or all only read."""

    tokens: np.ndarray
    """(tokens,) int64."""
    is_trained: bool
    begins_document: bool


@dataclass(frozen=True)
class Excerpt:
    """A sample or a document to show."""

    title: str
    spans: list[Span]
    num_pads: int = 0


def split_into_spans(tokens: np.ndarray, is_trained: np.ndarray, begins: np.ndarray) -> list[Span]:
    """Split a row of tokens where a document begins, and where training on them begins or ends.

    Args:
        tokens: (tokens,) int64.
        is_trained: (tokens,) bool.
        begins: (tokens,) bool: whether a document begins there.
    """
    is_border = begins.copy()
    is_border[1:] |= is_trained[1:] != is_trained[:-1]
    is_border[:1] = True
    starts = np.flatnonzero(is_border)
    parts = np.split(tokens, starts[1:])
    return [Span(part, bool(is_trained[at]), bool(begins[at])) for part, at in zip(parts, starts, strict=True)]


def sample_spans(arrays: Arrays, row: int, *, end_id: int) -> tuple[list[Span], int]:
    """Return the spans of a row of a batch, and the number of pads at its end.

    The last token of the row is its last label, which is predicted but not read. Without
    `position_ids`, a document begins after each end token.
    """
    input_ids, labels = arrays["input_ids"][row], tokens_of_labels(arrays["labels"][row])
    num_tokens = int(arrays["attention_mask"][row].sum()) if "attention_mask" in arrays else len(input_ids)
    is_trained = np.append(False, labels[:num_tokens] != IGNORE_INDEX)
    last = labels[num_tokens - 1 : num_tokens]
    tokens = np.append(input_ids[:num_tokens], last)
    if "position_ids" in arrays:
        begins = np.append(arrays["position_ids"][row][:num_tokens] == 0, False)
    else:
        begins = np.append(False, tokens[:-1] == end_id)
    if last[0] == IGNORE_INDEX:
        tokens, is_trained, begins = tokens[:-1], is_trained[:-1], begins[:-1]
    begins[:1] = False
    return split_into_spans(tokens, is_trained, begins), len(input_ids) - num_tokens


def inspect_run(config: DataConfig, *, part: str, first: int, count: int, name: str) -> None:
    """Show samples of a run, as the model sees them.

    Args:
        config: with absolute paths.
        part: TRAIN or VALIDATION.
        first: the index of the first sample, as stored.
        name: the name of the run, for messages.

    Raises:
        DataError: if the data cannot be prepared, or has no such sample.
    """
    prepared = prepare_data(config)
    samples = train_samples(prepared) if part == TRAIN else validation_samples(prepared)
    if samples is None:
        raise DataError(f"--part: {name} has no validation data", "set data.validation, or leave --part out")
    _check_index(
        first,
        count,
        len(samples),
        f"the {part} data of {name} have",
        "samples",
        "lower data.sequence_length, or add text",
    )
    for index in range(first, first + count):
        arrays = in_rows(samples.read(np.array([index])))
        rows = range(len(arrays["input_ids"]))
        for row in rows:
            spans, num_pads = sample_spans(arrays, row, end_id=prepared.tokenizer.end_id)
            part = f", {ROWS[row]}" if len(rows) > 1 else _judgement(arrays)
            _show(Excerpt(f"Sample {index:,} of {len(samples):,}{part}", spans, num_pads), prepared.tokenizer.load())


def _judgement(arrays: Arrays) -> str:
    if DESIRABLE not in arrays:
        return ""
    return ", desirable" if arrays[DESIRABLE][0] else ", undesirable"


def inspect_tokens(source: str, tokenizer_path: str | None, cache: Cache, *, first: int, count: int) -> None:
    """Show documents of a token file or a Megatron-LM pair.

    Args:
        source: see `is_tokenized`.
        tokenizer_path: the tokenizer that it was written with; None: the one beside it, where
            `meshtrain tokenize` writes it.
        first: the index of the first document.

    Raises:
        DataError: if the file cannot be opened or has no such document, or if there is no
            tokenizer.
    """
    tokenizer = _find_tokenizer(source, tokenizer_path, cache)
    file = open_token_file(source, tokenizer, cache)
    _check_index(first, count, file.counts.documents, f"{source} has", "documents", "tokenize text that is not empty")
    for index in range(first, first + count):
        start, end = int(file.offsets[index]), int(file.offsets[index + 1])
        tokens = file.tokens[start:end].astype(np.int64)
        is_trained = np.ones(len(tokens), np.bool_) if file.trained is None else np.asarray(file.trained[start:end])
        title = f"Document {index:,} of {file.counts.documents:,}, from token {start:,} on"
        _show(Excerpt(title, split_into_spans(tokens, is_trained, np.zeros(len(tokens), np.bool_))), tokenizer.load())


def _find_tokenizer(source: str, path: str | None, cache: Cache) -> TokenizerFiles:
    if not is_tokenized(source):
        raise DataError(f"{source} is neither a run file (.toml) nor a token file nor a Megatron-LM pair", "name one")
    tokens = Path(source)
    beside = (tokens if holds_several(tokens) else tokens.parent) / "tokenizer"
    if path is None and not beside.is_dir():
        raise DataError(
            f"there is no tokenizer beside {source}, at {beside}",
            "name the one that it was written with as --tokenizer",
        )
    return find_tokenizer(path or str(beside), cache, setting="--tokenizer")


def _check_index(first: int, count: int, found: int, what: str, kind: str, advice: str) -> None:
    """Check that what is to be shown exists; `advice` is for data that hold nothing."""
    if found == 0:
        raise DataError(f"there is nothing to show: {what} no {kind}", advice)
    if first + count > found:
        asked = f"{first:,}" if count == 1 else f"{first:,} to {first + count - 1:,}"
        raise DataError(f"--index: {asked} is asked for and {what} {found:,} {kind}", f"choose from 0 to {found - 1:,}")


def _show(excerpt: Excerpt, tokenizer: Tokenizer) -> None:
    num_tokens = sum(len(span.tokens) for span in excerpt.spans)
    num_trained = sum(len(span.tokens) for span in excerpt.spans if span.is_trained)
    documents = 1 + sum(span.begins_document for span in excerpt.spans)
    pads = f", {excerpt.num_pads:,} pads" if excerpt.num_pads else ""
    console.line(f"{excerpt.title}: {num_tokens:,} tokens of {documents:,} documents, {num_trained:,} trained on{pads}")
    console.styled(_segments(excerpt.spans, tokenizer))


def _segments(spans: Sequence[Span], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Yield texts and their styles."""
    before, after = ("", "") if console.has_colors() else READ_ONLY_MARKS
    for span in spans:
        if span.begins_document:
            yield "\n── a document begins ──\n", BORDER_STYLE
        if not span.is_trained:
            yield before, SPECIAL_STYLE
        yield from _decoded(span, tokenizer)
        if not span.is_trained:
            yield after, SPECIAL_STYLE
    yield "\n", ""


def _decoded(span: Span, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    is_special = np.isin(span.tokens, list(special))
    borders = np.flatnonzero(is_special[1:] != is_special[:-1]) + 1
    for tokens in np.split(span.tokens, borders):
        text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        style = SPECIAL_STYLE if tokens[0] in special else COLORS[span.is_trained]
        yield show_control_characters(text), style


def show_control_characters(text: str) -> str:
    """Replace characters that would move the cursor or change colors by their printable symbols."""
    return text.translate(PICTURES)
