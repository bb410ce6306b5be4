"""Text is fixed as by ftfy, and cleaned of superfluous spaces, control characters and requests."""

import random

import ftfy
import pytest

from meshtrain.corpus.steps import clean
from meshtrain.corpus.steps.clean import fix_text, is_boilerplate, remove_boilerplate
from meshtrain.data.text.sources import find_files

# Everything that a step of ftfy searches for, and text that may prevent the step.
ATOMS = [
    *["a", "b", " ", "\n", "\n\n", "\t", "<", "<b>", "&lt;", "&amp;", "&amp;eacute;", "&eacute;", "&;", "&x", "&#233;"],
    *["\r", "\r\n", "\x1b[31m", "\x00", "\x0c", "\x0b", "\x7f", "\x85", "\u2028", "\ud83e", "\ufeff"],
    *["é", "Ã©", "â€™", "ﬁ", "“", "Ａ", "e\u0301", "\xa0", "Â", "&#x2019;", "Ｌ＆ａｍｐ；", "&EACUTE;", "\u0085"],
]


def test_random_text_is_fixed_as_by_ftfy():
    rng = random.Random(0)
    changed = 0
    for _ in range(8_000):
        text = "".join(rng.choices(ATOMS, k=rng.randint(1, 14)))
        fixed = ftfy.fix_text(text)
        changed += fixed != text
        assert fix_text(text) == fixed, repr(text)
    assert 1000 < changed < 7_800


def test_real_text_is_fixed_as_by_ftfy():
    files = find_files(["python-stdlib"], key="sources")[::12]
    texts = [file.path.read_text("utf-8", "replace") for file in files]

    assert [fix_text(text) for text in texts] == [ftfy.fix_text(text) for text in texts]


def test_plain_text_is_not_passed_to_ftfy(monkeypatch):
    monkeypatch.setattr(clean, "fix_and_explain", None)

    assert fix_text("plain & simple\n\ttext; <b>&x</b>\n") == "plain & simple\n\ttext; <b>&x</b>\n"


def test_a_line_that_ftfy_cuts_is_fixed_as_by_ftfy():
    text = "a" * 999_999 + "é&eacute;<" + "a" * 1_000_000 + "&eacute;\n&eacute;"

    assert fix_text(text) == ftfy.fix_text(text)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a  b \t c \r\nd\u2028e\x85f", "a b c\nd\ne\nf"),
        ("    def f(x):\n        return  x\n", "    def f(x):\n        return x"),
        ("one\n \n\n\n\ntwo\n\n", "one\n\ntwo"),
        ("bell\x07 and\x00 null\x1b", "bell and null"),
        ("Story.\nPlease enable JavaScript to view this page.\nMore.", "Story.\nMore."),
        ("Story.\nThis website uses cookies to be better.\nMore.", "Story.\nMore."),
        ("Javascript is disabled in your browser.\nStory.", "Story."),
        ("We bake cookies, and JavaScript is a language.", "We bake cookies, and JavaScript is a language."),
    ],
)
def test_spaces_control_characters_and_requests_are_removed(text, cleaned):
    assert remove_boilerplate(text) == cleaned


def test_a_short_document_about_javascript_is_boilerplate():
    assert is_boilerplate("Loading... This page needs Javascript.")
    assert not is_boilerplate("Loading...")
    assert not is_boilerplate("JavaScript is a language. " * 10)
