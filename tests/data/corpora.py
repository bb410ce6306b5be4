"""Small corpora on disk, tokenized byte by byte, so that a test knows which tokens to expect."""

import json
import os
import random
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtrain.data.cache import Cache
from meshtrain.data.text.content_hashes import content_hashes
from meshtrain.data.text.corpus import Corpus
from meshtrain.data.text.documents import DocumentReader
from meshtrain.data.text.sources import find_files
from meshtrain.data.tokens.token_file import TRAIN, TokenFile
from meshtrain.data.tokens.tokenizer import TokenizerFiles
from meshtrain.data.tokens.tokenizer_training import train_tokenizer
from meshtrain.data.tokens.tokenizing import prepare_token_files


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run as a user whose file permissions are enforced, even if the tests run as root."""
    before = os.geteuid()
    os.seteuid(65534 if before == 0 else before)
    try:
        yield
    finally:
        os.seteuid(before)


def write_lines(path: Path, texts: list[str]) -> Path:
    """Write a .jsonl file with one document per text."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def open_corpus(*sources: Path | str, cache: Cache, **options) -> Corpus:
    files = find_files([str(source) for source in sources], key="data.train")
    return Corpus(tuple(files), tuple(content_hashes(files, cache)), **options)


def read_pieces(*sources: Path | str, **options) -> tuple[list, DocumentReader]:
    """Read all pieces, without a cache."""
    files = find_files([str(source) for source in sources], key="data.train")
    reader = DocumentReader(Corpus(tuple(files), (), **options))
    return list(reader), reader


def byte_tokenizer(cache: Cache) -> TokenizerFiles:
    """Return a byte-level BPE without room for a merge: one token per byte."""
    source = cache.directory / "any.txt"
    cache.directory.mkdir(parents=True, exist_ok=True)
    source.write_text("any text")
    return train_tokenizer([open_corpus(source, cache=cache)], 258, cache)


def expected_tokens(texts: list[str], tokenizer: TokenizerFiles) -> list[list[int]]:
    """Encode each text on its own, and add the end token."""
    loaded = tokenizer.load()
    return [[*loaded.encode(text, add_special_tokens=False).ids, tokenizer.end_id] for text in texts]


def random_texts(rng: random.Random, count: int, longest: int = 40) -> list[str]:
    return ["".join(rng.choices(string.ascii_letters, k=rng.randint(1, longest))) for _ in range(count)]


def token_file(directory: Path, texts: list[str]) -> tuple[TokenFile, TokenizerFiles]:
    """Tokenize texts into their own cache."""
    directory.mkdir(parents=True, exist_ok=True)
    cache = Cache(directory / "cache")
    tokenizer = byte_tokenizer(cache)
    corpus = open_corpus(write_lines(directory / "texts.jsonl", texts), cache=cache)
    files, _ = prepare_token_files(corpus, tokenizer, cache, description="Tokenizing")
    return files[TRAIN], tokenizer
