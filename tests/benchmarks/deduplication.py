"""Measure recall, precision and speed of deduplication, beside datatrove's pipeline and rensa.

python -m tests.benchmarks.deduplication [--documents 100000] [--injected 10000] [--similarity 0.8]
[--repeat 2]

The documents are pieces of the Python sources of this machine. The injected ones are copies in
which words are replaced, inserted and deleted. The similar pairs are computed exactly, for all
pairs: copies that existed before count, too.

- recall: the fraction of all pairs at least as similar as asked, of which not both documents are
kept.
- precision of pairs: a tool removes a document because of a kept one; the fraction of these pairs
that is as similar as asked.
- wrong: removed documents to which no kept document is as similar as asked.
- missed: kept documents to which an earlier kept document is as similar as asked.
- decided/s: documents per second until the removed documents are known; docs/s: until the others
are written, too.

All contenders use two processes and the same gzipped JSON lines; datatrove and meshtrain also write
the kept and the removed documents. datatrove has its default buckets (14 of 8 hashes), words split
at white space, since its default tokenizer needs spaCy, and bytes to hash, since xxhash 4 does not
accept text. rensa has 128 permutations, 16 bands, the words of meshtrain, and its estimate of the
similarity as a check. They take turns, and the fastest turn of each counts.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from tests.benchmarks.deduplicators import CONTENDERS, Outcome, Removals
from tests.benchmarks.duplicates_corpus import (
    Pairs,
    python_documents,
    similar_pairs,
    with_near_duplicates,
    write_corpus,
)


def judged(removals: Removals, truth: Pairs, similarity: float, num_documents: int) -> list[str]:
    """Return recall, recall near the similarity, precision, and counts.

    Recall near the similarity is that of pairs up to 0.1 above it. The counts are of the documents
    that are removed, wrongly removed, and missed.
    """
    stays = np.ones(num_documents, bool)
    stays[list(removals)] = False
    similar = truth.similarity >= similarity
    first, second, degree = (values[similar] for values in truth)
    both_left = stays[first] & stays[second]
    near = degree < similarity + 0.1
    claimed = {tuple(sorted(pair)) for pair in removals.items()}
    right = claimed & set(zip(first.tolist(), second.tolist(), strict=True))
    has_reason = np.zeros(num_documents, bool)
    has_reason[first[stays[second]]] = True
    has_reason[second[stays[first]]] = True
    wrong = int(np.count_nonzero(~stays & ~has_reason))
    missed = len(np.unique(second[both_left]))
    ratios = [1 - both_left.mean(), 1 - both_left[near].mean(), len(right) / max(1, len(claimed))]
    return [*(f"{ratio:.4f}" for ratio in ratios), *map(str, (len(removals), wrong, missed))]


def print_row(name: str, values: Sequence[str]) -> None:
    """Print one line of the table."""
    widths = (10, 8, 8, 8, 11, 9, 7, 8)
    print(name.rjust(10) + "".join(value.rjust(width) for value, width in zip(values, widths, strict=True)))


def main() -> None:
    """Build the corpus, find the similar pairs, run the contenders in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--injected", type=int, default=10_000)
    parser.add_argument("--similarity", type=float, default=0.8)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--tools", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--small", action="store_true", help="a few documents, to see that it works")
    arguments = parser.parse_args()
    size, injected, repeat = (
        (300, 100, 1) if arguments.small else (arguments.documents, arguments.injected, arguments.repeat)
    )
    # Packages follow each other: take the same share of every one.
    pieces = list(islice(python_documents(), 20 * size))
    texts = with_near_duplicates(random.Random(0).sample(pieces, min(size, len(pieces))), injected)
    with tempfile.TemporaryDirectory() as name:
        write_corpus(Path(name) / "source", texts)
        truth = find_truth(texts, arguments.similarity)
        outcomes = take_turns(Path(name), arguments.similarity, arguments.tools, repeat)
    print_outcomes(outcomes, truth, arguments.similarity, len(texts))


def find_truth(texts: list[str], similarity: float) -> Pairs:
    """Return the similar pairs of all documents, and print how many there are."""
    begin = time.perf_counter()
    truth = similar_pairs(texts, similarity)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts)} documents, {megabytes:.1f} MB, {len(truth.first)} pairs at {similarity} and above", flush=True)
    print(f"truth: {time.perf_counter() - begin:.1f} s", flush=True)
    return truth


def take_turns(directory: Path, similarity: float, tools: list[str], repeat: int) -> dict[str, Outcome]:
    """Return the fastest outcome of each contender."""
    best: dict[str, Outcome] = {}
    for _ in range(repeat):
        for tool in tools:
            outcome = CONTENDERS[tool](directory / "source", directory / tool, similarity)
            shutil.rmtree(directory / tool, ignore_errors=True)
            best[tool] = min(best.get(tool, outcome), outcome, key=lambda one: sum(one.stage_seconds.values()))
    return best


def print_outcomes(outcomes: dict[str, Outcome], truth: Pairs, similarity: float, num_documents: int) -> None:
    """Print the seconds of each stage, and a line of the table for each contender."""
    for tool, outcome in outcomes.items():
        print(f"{tool}:", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.stage_seconds.items()))
    higher = f"-{similarity + 0.1:.1f}"
    print_row("", ["decided/s", "docs/s", "recall", higher, "precision", "removed", "wrong", "missed"])
    for tool, (removals, seconds) in outcomes.items():
        whole = sum(seconds.values())
        speeds = [f"{num_documents / (whole - seconds.get('remove', 0)):.0f}"]
        speeds.append(f"{num_documents / whole:.0f}" if "remove" in seconds else "-")
        print_row(tool, [*speeds, *judged(removals, truth, similarity, num_documents)])


if __name__ == "__main__":
    main()
