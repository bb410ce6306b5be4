"""Cutting: the pieces of a document have the tokens of the full document, or it is not cut."""

import random

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Sequence, Split
from tokenizers.trainers import BpeTrainer

from meshtrain.data.tokens import cutting
from meshtrain.data.tokens.cutting import Cutter, TooLongError

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT4O = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
USUAL = {
    "gpt2": ByteLevel(add_prefix_space=False),
    "llama3": Sequence([Split(Regex(LLAMA3), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]),
    "gpt4o": Sequence([Split(Regex(GPT4O), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]),
}


PIECE_CHARACTERS = 1 << 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PIECE_CHARACTERS", PIECE_CHARACTERS)


def text_of(num_characters: int) -> str:
    """Return lines of letters, digits, signs and other alphabets, with all kinds of ends."""
    rng = random.Random(0)
    words = ["word", "under_score", "x", "1234", "don't", "==", "//", "été", "日本語", "🦜", "  ", "\t", "end;", " "]
    line_ends = ["\n", "\n\n", "\n    ", " \n", "\r\n", "\n/", "\n}"]
    lines = [" ".join(rng.choices(words, k=8)) + rng.choice(line_ends) for _ in range(1000)]
    text = "".join(lines)
    return (text * (num_characters // len(text) + 1))[:num_characters]


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer, text: str) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(
        [text[:50_000]], BpeTrainer(vocab_size=600, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    )
    return tokenizer


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", USUAL)
def test_pieces_have_the_tokens_of_the_document(name):
    text = text_of(3 * PIECE_CHARACTERS)
    tokenizer = trained(USUAL[name], text)

    pieces = list(Cutter(tokenizer).pieces(text))

    assert "".join(pieces) == text
    assert len(pieces) >= 3
    assert max(map(len, pieces)) <= PIECE_CHARACTERS
    assert [token for piece in pieces for token in ids(tokenizer, piece)] == ids(tokenizer, text)


def test_a_piece_does_not_depend_on_how_much_was_read():
    text = text_of(2 * PIECE_CHARACTERS)
    cutter = Cutter()
    whole = cutter.cut(text, is_all=True)

    read = {cutter.cut(text[:length], is_all=False) for length in range(0, len(text), 7)}

    assert read == {0, whole}


def test_line_end_where_tokens_would_join_is_skipped():
    # With this tokenizer, text before a slash and a line end joins the text after it.
    text = "word;\n/other\n" * 10_000
    tokenizer = trained(USUAL["gpt4o"], text)

    first = next(Cutter(tokenizer).pieces(text))

    assert first.endswith("other\n")


def test_tokenizer_that_puts_a_space_first_gets_the_full_document():
    text = "word other\n" * 15_000
    tokenizer = trained(Metaspace(), text)

    assert list(Cutter(tokenizer).pieces(text)) == [text]


def test_document_without_a_line_end_is_not_cut():
    text = "words " * 20_000

    assert list(Cutter(trained(USUAL["gpt2"], text)).pieces(text)) == [text]
    assert list(Cutter().pieces("")) == []


def test_document_too_long_for_one_piece_is_refused(monkeypatch):
    monkeypatch.setattr(cutting, "MAX_PIECE_CHARACTERS", 2 * PIECE_CHARACTERS)

    with pytest.raises(TooLongError) as caught:
        list(Cutter().pieces("x" * (2 * PIECE_CHARACTERS + 1)))

    assert str(caught.value) == (
        "the document is longer than 131,072 characters and has no line end where a cut would leave its tokens "
        "unchanged; split it into documents, or use another tokenizer"
    )
