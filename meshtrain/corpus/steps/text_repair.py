"""ftfy, where it has anything to do: most lines of most corpora are plain ASCII, and ftfy looks at them very slowly."""

import re

from ftfy import TextFixerConfig, fix_and_explain
from ftfy import fix_text as fix_whole_text

SEGMENT_CHARACTERS = 1_000_000
"""ftfy's `max_decode_length`: it cuts longer lines, where this module leaves the whole text to it."""

SUSPECT = re.compile(r"[^\t\n\x20-\x7e]")
"""All of ftfy's steps but the one for HTML entities change only characters that are not these."""
SUSPECT_OR_ENTITY = re.compile(r"[^\t\n\x20-\x7e]|&#?[0-9A-Za-z]{1,24};")

WITH_ENTITIES = TextFixerConfig(explain=False)
WITHOUT_ENTITIES = WITH_ENTITIES._replace(unescape_html=False)


def fix_text(text: str) -> str:
    """Return exactly what `ftfy.fix_text(text)` returns.

    ftfy mends a text line by line, and leaves HTML entities alone from the first line on that holds a `<`. A line
    without any suspect character stays as it is, so only the others are given to ftfy.
    """
    if SUSPECT_OR_ENTITY.search(text) is None:
        return text
    if len(text) > SEGMENT_CHARACTERS and max(map(len, text.split("\n"))) >= SEGMENT_CHARACTERS:
        return fix_whole_text(text, WITH_ENTITIES)
    angle = text.find("<")
    markup = len(text) if angle == -1 else text.rfind("\n", 0, angle) + 1
    fixed: list[str] = []
    _fix_lines(text, 0, markup, SUSPECT_OR_ENTITY, WITH_ENTITIES, fixed)
    _fix_lines(text, markup, len(text), SUSPECT, WITHOUT_ENTITIES, fixed)
    return "".join(fixed)


def _fix_lines(
    text: str, start: int, end: int, suspect: re.Pattern[str], config: TextFixerConfig, fixed: list[str]
) -> None:
    while match := suspect.search(text, start, end):
        line = text.rfind("\n", start, match.start()) + 1 or start
        following = text.find("\n", match.start(), end) + 1 or end
        fixed += (text[start:line], fix_and_explain(text[line:following], config).text)
        start = following
    fixed.append(text[start:end])
