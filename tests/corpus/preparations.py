"""Corpus files for the tests, and the documents that the steps wrote."""

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

import tomli_w
import zstandard
from datatrove.data import Document

from meshtrain.config.toml import load_corpus
from meshtrain.corpus.preparation import run_chain
from meshtrain.corpus.steps.shards import Compression, ShardWriter, as_line

SENTENCE = "the quick brown fox jumps over a lazy dog while seven small boats drift slowly down some river"
WORDS = SENTENCE.split()


def texts(number: int, *, words: int = 40, seed: int = 0) -> list[str]:
    """Return English texts that differ."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) + f" {position}." for position in range(number)]


def write_records(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_shard(directory: Path, name: str, compression: Compression, documents: Iterable[Document]) -> None:
    """Write documents to one shard."""
    with ShardWriter(directory, name, compression) as writer:
        for document in documents:
            writer.write(as_line(document))


def write_corpus_file(directory: Path, **settings: object) -> Path:
    """Write a corpus file with one worker, which runs in the process of the test."""
    path = directory / "corpus.toml"
    path.write_text(tomli_w.dumps({"directory": "out", "workers": 1, **settings}))
    return path


def prepare(file: Path, *overrides: str, only: str | None = None, redo: str | None = None) -> None:
    run_chain(load_corpus(file, overrides), only=only, redo=redo)


def read_shards(directory: Path) -> list[dict]:
    """Return all records of a directory of shards, in order."""
    lines: list[str] = []
    unpack = {".gz": gzip.decompress, ".zst": _unpack_zstd, ".jsonl": bytes}
    for path in sorted(directory.glob("*.jsonl*")):
        lines += unpack[path.suffix](path.read_bytes()).decode().splitlines()
    return [json.loads(line) for line in lines]


def _unpack_zstd(content: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(content)


def counts_of(step: Path) -> dict:
    return json.loads((step / "counts.json").read_text())


def contents(directory: Path) -> dict[str, bytes]:
    """Return the files of a result: shards, dropped shards and settings, without logs and times."""
    paths = (path for path in directory.rglob("*") if path.is_file() and "logs" not in path.parts)
    kept = {str(path.relative_to(directory)): path.read_bytes() for path in paths if path.name[0] != "."}
    return {
        name: content for name, content in kept.items() if not name.endswith(("counts.json", "content-hashes.json"))
    }
