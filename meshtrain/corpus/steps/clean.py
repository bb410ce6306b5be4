"""Cleaning: text is mended, and documents in other languages or without enough text are dropped."""

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from datatrove.data import Document
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from meshtrain.config.corpus import CleanConfig
from meshtrain.corpus.steps.blocks import Judge, ReadShards, Sieve, WriteShards, names_of
from meshtrain.corpus.steps.boilerplate import is_boilerplate, without_boilerplate
from meshtrain.corpus.steps.shard_pass import ShardPass
from meshtrain.corpus.steps.shards import Compression, list_shards
from meshtrain.corpus.steps.text_repair import fix_text
from meshtrain.data.tokens.tokenizer import load_tokenizer
from meshtrain.errors import DataError

IDENTIFIED_CHARACTERS = 2000
"""The beginning tells the language, and the whole text would take seven times as long."""
CHARACTERS_PER_TOKEN = 16
"""The beginning of a long text that is encoded first: so many characters for each required token."""

BOILERPLATE = "boilerplate"
OTHER_LANGUAGE = "other language"
UNSURE_LANGUAGE = "unsure language"
TOO_SHORT = "too short"
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Thai, Lao, Burmese, Khmer, Japanese and Chinese characters."""


def cleaning_stages(
    source: Path, target: Path, dropped: Path, config: CleanConfig, compression: Compression
) -> list[ShardPass]:
    """Return the stages that clean the shards in `source`."""
    shards = list_shards(source)
    names = names_of(shards)
    judge = Sieve(partial(build_judge, config), dropped, names, compression)
    return [ShardPass("clean", [ReadShards(shards), judge, WriteShards(target, names, compression)], len(shards))]


def check_cleaning(config: CleanConfig) -> None:
    """Check what only a look at the models tells, so that nobody learns of it when the sources have been read.

    Raises:
        DataError: if a language or the tokenizer is unknown.
    """
    if config.languages and (unknown := sorted(set(config.languages) - set(_identifier().labels))):
        known = ", ".join(sorted(_identifier().labels))
        raise DataError(f"clean.languages: {', '.join(unknown)} cannot be identified; known are {known}")
    if config.tokenizer is not None:
        try:
            load_tokenizer(tokenizer_file(config.tokenizer))
        except DataError as error:
            raise DataError(f"clean.tokenizer: {error}") from error


def build_judge(config: CleanConfig) -> Judge:
    """Return what mends a document and tells why it is to be dropped, if it is."""
    identifier = _identifier() if config.languages else None
    has_enough = _length_test(config)

    def judge(document: Document) -> str | None:
        if config.fix_text:
            document.text = fix_text(document.text)
        if config.remove_boilerplate:
            if is_boilerplate(document.text):
                return BOILERPLATE
            document.text = without_boilerplate(document.text)
        if identifier is not None:
            language, confidence = identifier.classify(document.text[:IDENTIFIED_CHARACTERS])
            document.metadata["language"] = language
            if language not in config.languages:
                return OTHER_LANGUAGE
            if confidence < config.minimum_confidence:
                return UNSURE_LANGUAGE
        return None if has_enough(document.text) else TOO_SHORT

    return judge


def tokenizer_file(path: str) -> Path:
    """Return the tokenizer.json that a path names.

    Raises:
        DataError: if there is none.
    """
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise DataError(f"there is no {file}; name a local tokenizer.json or the directory of one")
    return file


@cache
def _identifier() -> LanguageIdentifier:
    # It takes a second to load: once in a process, not in each of its tasks.
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _words(text: str) -> int:
    """Return the number of words; of a script that puts no spaces between them, of characters."""
    return len(text.split()) + len(UNSPACED.findall(text))


def _length_test(config: CleanConfig) -> Callable[[str], bool]:
    least = config.minimum_tokens
    if config.tokenizer is None:
        return lambda text: len(text.split(maxsplit=least)) >= least or _words(text) >= least
    tokenizer = load_tokenizer(tokenizer_file(config.tokenizer))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    def has_enough(text: str) -> bool:
        # A cut may split a token or two, so that its beginning may have more of them than the text: not twice as many.
        beginning = text[: least * CHARACTERS_PER_TOKEN]
        return (len(beginning) < len(text) and count(beginning) >= 2 * least) or count(text) >= least

    return has_enough
