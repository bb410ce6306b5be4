"""Real documents, some of them with near duplicates, and exactly which pairs are similar."""

import gzip
import json
import random
import re
import site
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

NGRAM = 5
SHORTEST_CHARACTERS, LONGEST_CHARACTERS = 1000, 8000
NUM_SHARDS = 20
STATEMENT = re.compile(r"^(?=\w|@)", re.MULTILINE)
WORD = re.compile(r"\w+")

Positions = NDArray[np.int64]


class Pairs(NamedTuple):
    """Similar pairs of documents, the first before the second, in order."""

    first: Positions
    second: Positions
    similarity: NDArray[np.float64]


def python_documents() -> Iterator[str]:
    """Yield the Python sources of the machine, cut before unindented statements.

    A piece has at least 1,000 characters; a shorter rest of a file is omitted. A statement that
    would make a piece longer than 8,000 characters is cut there. Pieces of less than 50 words are
    omitted.
    """
    places = dict.fromkeys((sysconfig.get_path("stdlib"), *site.getsitepackages(), "/usr/lib/python3"))
    for path in (path for place in places for path in sorted(Path(place).rglob("*.py"))):
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        yield from (piece for piece in _pieces(text) if len(WORD.findall(piece)) >= 50)


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    for border in [*(match.start() for match in STATEMENT.finditer(text)), len(text)]:
        while border - begin > LONGEST_CHARACTERS:
            yield text[begin : begin + LONGEST_CHARACTERS]
            begin += LONGEST_CHARACTERS
        if border - begin >= SHORTEST_CHARACTERS:
            yield text[begin:border]
            begin = border


def with_near_duplicates(documents: list[str], number: int) -> list[str]:
    """Return documents and changed copies of some, shuffled; similarities range from 0.5 to 1."""
    source = random.Random(0)
    vocabulary = sorted({word for text in documents[:1000] for word in WORD.findall(text)})
    changed = [_changed(source.choice(documents), source, vocabulary) for _ in range(number)]
    mixed = documents + changed
    source.shuffle(mixed)
    return mixed


def _changed(text: str, source: random.Random, vocabulary: list[str]) -> str:
    wanted = source.uniform(0.5, 1)
    # Two sets of equal size with similarity s share 2s / (1 + s) of each; an n-gram is kept if its
    # n words are.
    rate = 1 - (2 * wanted / (1 + wanted)) ** (1 / NGRAM)

    def change(match: re.Match[str]) -> str:
        if source.random() > rate:
            return match[0]
        other = source.choice(vocabulary)
        return source.choice((other, "", f"{match[0]} {other}"))

    return WORD.sub(change, text)


def write_corpus(directory: Path, texts: Sequence[str]) -> None:
    """Write shards of JSON lines; the `id` of a document is its position in the corpus."""
    directory.mkdir()
    borders = np.linspace(0, len(texts), NUM_SHARDS + 1, dtype=int).tolist()
    for number, (begin, end) in enumerate(pairwise(borders)):
        with gzip.open(directory / f"{number:05d}.jsonl.gz", "wt", compresslevel=4, encoding="utf-8") as file:
            for place in range(begin, end):
                file.write(json.dumps({"text": texts[place], "id": str(place)}, ensure_ascii=False) + "\n")


def plain_shingles(text: str) -> list[str]:
    """Return the different runs of 5 words of a text, lower-cased."""
    words = WORD.findall(text.lower())
    return list({" ".join(words[place : place + NGRAM]) for place in range(max(1, len(words) - NGRAM + 1))})


def _hashed_shingles(text: str) -> NDArray[np.uint64]:
    return np.sort(np.array([xxh3_64_intdigest(run.encode()) for run in plain_shingles(text)], np.uint64))


def similar_pairs(texts: Sequence[str], least: float) -> Pairs:
    """Return all pairs of texts with a Jaccard similarity of at least `least`, with separate code.

    Two sets this similar share one of the rarest shingles of each: of all but the `ceil(least *
    size) - 1` most common ones. So only sets that share such a shingle are compared (Chaudhuri,
    Ganti, Kaushik 2006; Bayardo, Ma, Srikant 2007).
    """
    with get_context("fork").Pool(2) as pool:
        sets = pool.map(_hashed_shingles, texts, chunksize=200)
    first_of: dict[bytes, int] = {}
    copies: dict[int, list[int]] = {}
    for place, one in enumerate(sets):
        copies.setdefault(first_of.setdefault(one.tobytes(), place), []).append(place)
    different = sorted(copies)
    found: list[tuple[int, int, float]] = []
    for one, other in _candidates([sets[place] for place in different], least).tolist():
        here, there = different[one], different[other]
        similarity = _jaccard(sets[here], sets[there])
        if similarity >= least:
            found += [(*sorted((a, b)), similarity) for a in copies[here] for b in copies[there]]  # type: ignore[misc]
    for members in copies.values():
        found += [(a, b, 1.0) for number, a in enumerate(members) for b in members[number + 1 :]]
    found.sort()
    first, second, similarity = zip(*found, strict=True)
    return Pairs(np.array(first), np.array(second), np.array(similarity))


def _jaccard(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> float:
    num_common = len(np.intersect1d(one, other, assume_unique=True))
    return num_common / (len(one) + len(other) - num_common)


def _candidates(sets: list[NDArray[np.uint64]], least: float) -> Positions:
    """Return (pairs, 2) int64 of the sets that share a rare shingle and are of similar size."""
    sizes = np.array([len(one) for one in sets])
    owners = np.repeat(np.arange(len(sets)), sizes)
    _, shingle, counts = np.unique(np.concatenate(sets), return_inverse=True, return_counts=True)
    rank = np.argsort(np.argsort(counts, kind="stable"), kind="stable")[shingle]
    order = np.lexsort((rank, owners))
    rank, shingle = rank[order], shingle[order]
    place = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    num_rarest = np.repeat(sizes - np.ceil(least * sizes - 1e-9).astype(int) + 1, sizes)
    rare = (place < num_rarest) & (counts[shingle] > 1)
    rank, owners = rank[rare], owners[rare]
    order = np.argsort(rank, kind="stable")
    rank, owners = rank[order], owners[order]
    found = [np.zeros(0, np.int64)]
    for distance in range(1, len(rank)):
        same = np.flatnonzero(rank[distance:] == rank[:-distance])
        if not len(same):
            break
        one, other = owners[same], owners[same + distance]
        fits = np.minimum(sizes[one], sizes[other]) >= least * np.maximum(sizes[one], sizes[other]) - 1e-9
        found.append(np.unique(one[fits] * len(sets) + other[fits]))
    return np.stack(np.divmod(np.unique(np.concatenate(found)), len(sets)), axis=1)
