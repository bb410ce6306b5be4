"""Cutting: documents too long to be tokenized at once, cut where the tokens come out as if they were not.

A tokenizer may join what stands on both sides of a cut, or put something before the first word it sees. So a cut is
tried: it is made only where what lies around it becomes the same tokens in one piece and in two. With the usual
byte-level BPE, whose words never reach over a line end between two letters, nearly every line end will do; with one
that puts a blank before its first word, as many of sentencepiece, none does, and the document stays whole.
"""

import re
from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer

PIECE_CHARACTERS = 1 << 20
"""Longer documents are cut after the last fit line end before this, or the first after it."""

MAX_PIECE_CHARACTERS = 1 << 25
"""Memory that one encoding may take: about a hundred bytes per token."""

CONTEXT_CHARACTERS = 200
"""What is encoded on each side of a cut to try it: more than any word that a tokenizer has learnt."""

MAX_CUT_ATTEMPTS = 200
LINE_END = re.compile(r"(?<=\S)(?:\r\n|\n|\r)(?=\S)")


class TooLongError(ValueError):
    """A document can be neither encoded whole nor cut."""


class Cutter:
    """Cuts long documents.

    Args:
        tokenizer: that the pieces are for; None: any line end will do.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    def pieces(self, text: str) -> Iterator[str]:
        """Yield the pieces of a document that is in memory.

        Raises:
            TooLongError: if there is no place to cut it.
        """
        start = 0
        while start < len(text):
            length = self.cut(text, start, is_all=True)
            yield text[start : start + length]
            start += length

    def cut(self, text: str, start: int = 0, *, is_all: bool) -> int:
        """Return how long the piece is that begins at `start`; 0: there is no telling without more of the document.

        It depends on the document alone, and not on how much of it is there already: who goes on in its middle, with
        nothing read ahead, must come to the same pieces.

        Args:
            is_all: whether the document ends with this text.

        Raises:
            TooLongError: if the piece would be longer than MAX_PIECE_CHARACTERS.
        """
        if is_all and len(text) - start <= PIECE_CHARACTERS:
            return len(text) - start
        last = len(text) if is_all else len(text) - CONTEXT_CHARACTERS
        if last - start < PIECE_CHARACTERS:
            return 0
        longest = start + MAX_PIECE_CHARACTERS
        for place in islice(_line_ends(text, start, min(last, longest)), MAX_CUT_ATTEMPTS):
            if self._is_fit(text, start, place):
                return place - start
        if last > longest:
            raise TooLongError(
                f"the document is longer than {MAX_PIECE_CHARACTERS:,} characters and has no line end where it "
                "could be cut without another tokenization; cut it into documents, or take another tokenizer"
            )
        return len(text) - start if is_all else 0

    def _is_fit(self, text: str, start: int, place: int) -> bool:
        if self._tokenizer is None:
            return True
        before = text[max(start, place - CONTEXT_CHARACTERS) : place]
        after = text[place : place + CONTEXT_CHARACTERS]
        whole, *parts = (
            self._tokenizer.encode(part, add_special_tokens=False).ids for part in (before + after, before, after)
        )
        return whole == parts[0] + parts[1]


def _line_ends(text: str, start: int, last: int) -> Iterator[int]:
    """Yield where pieces may end: backwards from PIECE_CHARACTERS, then forwards up to `last`."""
    middle = min(start + PIECE_CHARACTERS, last)
    window = start + PIECE_CHARACTERS * 3 // 4
    yield from reversed([match.end() for match in LINE_END.finditer(text, window, middle)])
    for match in LINE_END.finditer(text, middle, last):
        yield match.end()
