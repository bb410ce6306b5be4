"""Shingles equal those made with a regular expression and Python's sets."""

import random
import re
import sys

import numpy as np
import pytest

from meshtrain.corpus.duplicates.shingles import _word_points, jaccard, shingles_of, word_bytes
from tests.corpus.near_duplicates import plain_jaccard, plain_shingles, plain_words

TEXTS = [
    "",
    " \n\t.,;",
    "one",
    "One",
    "one two three four",
    "one two three four five",
    "one two three four five one two three four five one two three four five",
    "four three two one",
    "a_b-c d.e_f(g) h0 1",
    "x" * 7 + " " + "x" * 8 + " " + "x" * 9 + " " + "x" * 63 + " " + "x" * 64 + " " + "x" * 65 + " " + "x" * 5000,
    "y" * 5000,
    "Grüße aus KÖLN, ναι! ΣΊΣΥΦΟΣ İstanbul ǅ ß ﬁ",
    "天地玄黃 宇宙洪荒。日月盈昃, 辰宿列張",
    "emoji 😀 between 😀words😀 and zero\0bytes\0 here",
    "half \ud800 a pair \udfff of surrogates",
    "é" * 40 + " " + "e\u0301" * 3,
    "no\u00a0break\u2028line\u200bzero width",
]


@pytest.mark.parametrize("text", TEXTS)
def test_words_equal_those_of_the_regular_expression(text: str) -> None:
    assert [word.decode() for word in word_bytes(text).split(b"\0") if word] == plain_words(text)


def test_every_character_is_classified_as_by_the_regular_expression() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert set(re.findall(r"\w", every)) == {every[point] for point in np.flatnonzero(_word_points())}


@pytest.mark.parametrize("ngram", [1, 2, 5])
def test_shingles_are_equal_exactly_where_runs_of_words_are_equal(ngram: int) -> None:
    shingles = shingles_of(TEXTS, ngram)
    sets = [shingles.hashes[start:end] for start, end in zip(shingles.starts, shingles.starts[1:], strict=False)]
    assert [len(one) for one in sets] == [len(plain_shingles(text, ngram)) for text in TEXTS]
    for one, text in zip(sets, TEXTS, strict=True):
        assert np.array_equal(one, np.unique(one))
        for other, other_text in zip(sets, TEXTS, strict=True):
            assert jaccard(one, other) == plain_jaccard(text, other_text, ngram)


def test_shingles_of_a_text_do_not_depend_on_the_other_texts() -> None:
    together = shingles_of(TEXTS, 5)
    for number, text in enumerate(TEXTS):
        alone = shingles_of([text], 5)
        assert np.array_equal(alone.hashes, together.hashes[together.starts[number] : together.starts[number + 1]])
    assert len(shingles_of([], 5).hashes) == 0


def test_many_words_and_runs_have_distinct_hashes() -> None:
    source = random.Random(0)
    words = {"".join(source.choices("abcdefgh_é", k=source.randint(1, 30))) for _ in range(100_000)}
    assert len(shingles_of([" ".join(sorted(words))], 1).hashes) == len(words)
    text = " ".join(source.choices("ab", k=30_000))
    assert len(shingles_of([text], 12).hashes) == len(plain_shingles(text, 12))
