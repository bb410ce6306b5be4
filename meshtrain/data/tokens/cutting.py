"""Cutting: long documents are split into pieces without a change of their tokens.

A tokenizer may join characters across a cut, or put something before the first word of a text. So
each cut is tested: the text around it must give the same tokens in one piece and in two. For the
usual byte-level BPE, nearly every line end passes. For a tokenizer that puts a space before the
first word, as many of sentencepiece do, none passes, and the document stays in one piece.
"""

import re
from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer

PIECE_CHARACTERS = 1 << 20
"""Longer documents are cut after the last suitable line end before this, or the first after it."""

MAX_PIECE_CHARACTERS = 1 << 25
"""Limits the memory of one encoding, which takes about a hundred bytes per token."""

CONTEXT_CHARACTERS = 200
"""The text on each side of a cut that is encoded to test it: longer than any word of a tokenizer.
"""

MAX_CUT_ATTEMPTS = 200
LINE_END = re.compile(r"(?<=\S)(?:\r\n|\n|\r)(?=\S)")


class TooLongError(ValueError):
    """A document is too long to be encoded, and cannot be cut."""


class Cutter:
    """Cuts long documents.

    Args:
        tokenizer: the one that encodes the pieces; None: any line end passes.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    def pieces(self, text: str) -> Iterator[str]:
        """Yield the pieces of a document that is in memory.

        Raises:
            TooLongError: if it cannot be cut.
        """
        start = 0
        while start < len(text):
            length = self.cut(text, start, is_all=True)
            yield text[start : start + length]
            start += length

    def cut(self, text: str, start: int = 0, *, is_all: bool) -> int:
        """Return the length of the piece that starts at `start`; 0: more of the document is needed.

        The length depends on the document alone, and not on how much of it was read. A job that
        resumes within a document must find the same pieces.

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
        for position in islice(_line_ends(text, start, min(last, longest)), MAX_CUT_ATTEMPTS):
            if self._is_suitable(text, start, position):
                return position - start
        if last > longest:
            raise TooLongError(
                f"the document is longer than {MAX_PIECE_CHARACTERS:,} characters and has no line end where a "
                "cut would leave its tokens unchanged; split it into documents, or use another tokenizer"
            )
        return len(text) - start if is_all else 0

    def _is_suitable(self, text: str, start: int, position: int) -> bool:
        if self._tokenizer is None:
            return True
        before = text[max(start, position - CONTEXT_CHARACTERS) : position]
        after = text[position : position + CONTEXT_CHARACTERS]
        uncut, *parts = (
            self._tokenizer.encode(part, add_special_tokens=False).ids for part in (before + after, before, after)
        )
        return uncut == parts[0] + parts[1]


def _line_ends(text: str, start: int, last: int) -> Iterator[int]:
    """Yield the ends of lines: backwards from PIECE_CHARACTERS, then forwards up to `last`."""
    middle = min(start + PIECE_CHARACTERS, last)
    window = start + PIECE_CHARACTERS * 3 // 4
    yield from reversed([match.end() for match in LINE_END.finditer(text, window, middle)])
    for match in LINE_END.finditer(text, middle, last):
        yield match.end()
