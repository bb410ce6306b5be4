"""The step `clean`: text is repaired, and unwanted documents are dropped.

A document is dropped if it is boilerplate, in another language or too short.

Source: the boilerplate rules follow those of Megatron-LM's tools/openwebtext
(cleanup_fix_dataset.py), reimplemented.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from datatrove.data import Document
from ftfy import TextFixerConfig, fix_and_explain
from ftfy import fix_text as fix_full_text
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from meshtrain.config.corpus import CleanConfig
from meshtrain.corpus.steps.blocks import Filter, FilterDocuments, ReadShards, ShardPass, WriteShards, shard_names
from meshtrain.corpus.steps.shards import Compression, list_shards
from meshtrain.data.tokens.tokenizer import load_tokenizer
from meshtrain.errors import DataError

IDENTIFIED_CHARACTERS = 2000
"""The language is identified from this part of a text.

The full text would take seven times as long.
"""
CHARACTERS_PER_TOKEN = 16
"""Of a long text, this many characters for each required token are encoded first."""

BOILERPLATE = "boilerplate"
OTHER_LANGUAGE = "other language"
UNSURE_LANGUAGE = "unsure language"
TOO_SHORT = "too short"
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Thai, Lao, Burmese, Khmer, Japanese and Chinese characters."""

FTFY_LINE_CHARACTERS = 1_000_000
"""ftfy's `max_decode_length`. ftfy cuts longer lines, so texts with such lines are left to it."""
SUSPECT = re.compile(r"[^\t\n\x20-\x7e]")
"""Characters that ftfy may change, if HTML entities are left alone."""
SUSPECT_OR_ENTITY = re.compile(r"[^\t\n\x20-\x7e]|&#?[0-9A-Za-z]{1,24};")
WITH_ENTITIES = TextFixerConfig(explain=False)
WITHOUT_ENTITIES = WITH_ENTITIES._replace(unescape_html=False)

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


def cleaning_passes(
    source: Path, target: Path, dropped: Path, config: CleanConfig, compression: Compression
) -> list[ShardPass]:
    """Return the passes that clean the shards in `source`."""
    shards = list_shards(source)
    names = shard_names(shards)
    filtering = FilterDocuments(partial(build_filter, config), dropped, names, compression)
    return [ShardPass("clean", [ReadShards(shards), filtering, WriteShards(target, names, compression)], len(shards))]


def check_cleaning(config: CleanConfig) -> None:
    """Check the settings that need a model, before the sources are read.

    Raises:
        DataError: if a language or the tokenizer is unknown.
    """
    if config.languages and (unknown := sorted(set(config.languages) - set(_identifier().labels))):
        known = ", ".join(sorted(_identifier().labels))
        raise DataError(f"clean.languages: {', '.join(unknown)} cannot be identified", f"use one of {known}")
    if config.tokenizer is not None:
        try:
            load_tokenizer(tokenizer_file(config.tokenizer))
        except DataError as error:
            raise DataError(f"clean.tokenizer: {error}") from error


def build_filter(config: CleanConfig) -> Filter:
    """Return the filter that repairs the text of a document and returns the reason to drop it."""
    identifier = _identifier() if config.languages else None
    has_enough = _build_length_check(config)

    def clean(document: Document) -> str | None:
        if config.fix_text:
            document.text = fix_text(document.text)
        if config.remove_boilerplate:
            if is_boilerplate(document.text):
                return BOILERPLATE
            document.text = remove_boilerplate(document.text)
        if identifier is not None:
            language, confidence = identifier.classify(document.text[:IDENTIFIED_CHARACTERS])
            document.metadata["language"] = language
            if language not in config.languages:
                return OTHER_LANGUAGE
            if confidence < config.minimum_confidence:
                return UNSURE_LANGUAGE
        return None if has_enough(document.text) else TOO_SHORT

    return clean


def tokenizer_file(path: str) -> Path:
    """Return the path of a tokenizer.json.

    Args:
        path: the file itself, or the directory that holds it.

    Raises:
        DataError: if there is no such file.
    """
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise DataError(f"there is no {file}", "name a local tokenizer.json or the directory of one")
    return file


def fix_text(text: str) -> str:
    """Return exactly what `ftfy.fix_text(text)` returns, faster for text that is mostly ASCII.

    ftfy works line by line. It leaves HTML entities alone from the first line that contains `<`.
    It does not change a line without suspect characters, so only the other lines are passed to it.
    """
    if SUSPECT_OR_ENTITY.search(text) is None:
        return text
    if len(text) > FTFY_LINE_CHARACTERS and max(map(len, text.split("\n"))) >= FTFY_LINE_CHARACTERS:
        return fix_full_text(text, WITH_ENTITIES)
    bracket = text.find("<")
    markup = len(text) if bracket == -1 else text.rfind("\n", 0, bracket) + 1
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


def is_boilerplate(text: str) -> bool:
    """Return whether a text is short and mentions JavaScript, as pages that did not load do."""
    return len(text) < SHORT_CHARACTERS and JAVASCRIPT.search(text) is not None


def remove_boilerplate(text: str) -> str:
    """Return the text without control characters and lines that ask for JavaScript or cookies.

    Lines end with `\\n`, and runs of spaces become one space. The indentation of a line is kept,
    for code and poems. Several blank lines become one.
    """
    text = LINE_ENDS.sub("\n", text).translate(CONTROL_CHARACTERS)
    lines = [_normalize_spaces(line) for line in text.split("\n") if not _is_request(line)]
    return BLANK_LINES.sub("\n\n", "\n".join(lines)).strip("\n")


def _is_request(line: str) -> bool:
    return len(line) <= LONGEST_REQUEST_CHARACTERS and REQUEST.search(line) is not None


def _normalize_spaces(line: str) -> str:
    words = line.strip()
    indentation = line[: len(line) - len(line.lstrip())]
    return indentation + SPACES.sub(" ", words) if words else ""


@cache
def _identifier() -> LanguageIdentifier:
    # Loading takes a second, so it is done once in a process and not in each of its tasks.
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _count_words(text: str) -> int:
    """Return the number of words; in a script without spaces between words, of characters."""
    return len(text.split()) + len(UNSPACED.findall(text))


def _build_length_check(config: CleanConfig) -> Callable[[str], bool]:
    least = config.minimum_tokens
    if config.tokenizer is None:
        return lambda text: len(text.split(maxsplit=least)) >= least or _count_words(text) >= least
    tokenizer = load_tokenizer(tokenizer_file(config.tokenizer))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    def has_enough(text: str) -> bool:
        # Cutting a text may split a token, so the beginning may have a few more tokens than the
        # full text. It never has twice as many.
        beginning = text[: least * CHARACTERS_PER_TOKEN]
        return (len(beginning) < len(text) and count(beginning) >= 2 * least) or count(text) >= least

    return has_enough
