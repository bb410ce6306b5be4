"""General cleaning: white space, control characters, and lines that only ask the reader to switch something on.

Source: the rules of Megatron-LM's tools/openwebtext (cleanup_fix_dataset.py), in words of our own.
"""

import re
import unicodedata

SHORT_CHARACTERS = 256
JAVASCRIPT = re.compile("javascript", re.IGNORECASE)

REQUEST = re.compile(
    r"(?:\b(?:enable|activate|turn on|switch on|requires?|without|disabled)\b.*\b(?:javascript|cookies)\b"
    r"|\b(?:javascript|cookies)\b.*\b(?:enable|enabled|disabled|activate|required|turned off|not supported)\b"
    r"|\b(?:we|site|website|page) uses? cookies\b)",
    re.IGNORECASE,
)
LONGEST_REQUEST_CHARACTERS = 200

LINE_ENDS = re.compile(r"\r\n?|[\x85\u2028\u2029]")
SPACES = re.compile(r"[^\S\n]+")
BLANK_LINES = re.compile(r"\n{3,}")
CONTROL_CHARACTERS = {
    code: None for code in range(0x110000) if unicodedata.category(chr(code)) == "Cc" and chr(code) not in "\t\n"
}


def is_boilerplate(text: str) -> bool:
    """Tell whether a document is so short, and about JavaScript, that it is a page that did not load."""
    return len(text) < SHORT_CHARACTERS and JAVASCRIPT.search(text) is not None


def without_boilerplate(text: str) -> str:
    """Return the text without control characters and requests, with `\\n` as line end and single spaces.

    The indentation of a line stays, for code and poems; of several blank lines one stays.
    """
    text = LINE_ENDS.sub("\n", text).translate(CONTROL_CHARACTERS)
    lines = [_tidied(line) for line in text.split("\n") if not _is_request(line)]
    return BLANK_LINES.sub("\n\n", "\n".join(lines)).strip("\n")


def _is_request(line: str) -> bool:
    return len(line) <= LONGEST_REQUEST_CHARACTERS and REQUEST.search(line) is not None


def _tidied(line: str) -> str:
    words = line.strip()
    indentation = line[: len(line) - len(line.lstrip())]
    return indentation + SPACES.sub(" ", words) if words else ""
