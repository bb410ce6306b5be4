"""Near duplicates: recall, precision and documents per second, next to datatrove's own pipeline and to rensa.

    python -m tests.benchmarks.deduplication [--documents 100000] [--injected 10000] [--similarity 0.8]

The documents are pieces of the Python sources of this machine; the injected ones are copies of them in which words are
replaced, inserted and deleted. What is similar is computed exactly, for all pairs: copies that were there before count.

- recall: of all pairs at least as similar as asked, the part of which not both documents are left.
- precision of pairs: a tool removes a document because of one that stays; the part of these pairs that is as similar as
  asked.
- wrong: removed documents to which no document that stays is as similar as asked.
- missed: documents that stay although an earlier one that stays is as similar as asked.

All take part with two processes, from the same gzipped JSON lines; datatrove and meshtrain also write what stays and
what goes. datatrove has its default buckets (14 of 8 hashes) and words between white space, as its default tokeniser
needs spaCy; and bytes to hash, as xxhash 4 takes no text any more. rensa has 128 permutations, 16 bands, the words of
meshtrain, and its estimate of the similarity as a check.
"""

import argparse
import gzip
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.word_tokenizers import WordTokenizer
from rensa import RMinHash, RMinHashLSH
from xxhash import xxh64_intdigest

from meshtrain.config.corpus import DeduplicateConfig
from meshtrain.corpus.deduplicate import deduplication_stages
from tests.benchmarks.duplicates_corpus import (
    Pairs,
    plain_shingles,
    python_documents,
    similar_pairs,
    with_near_duplicates,
    write_corpus,
)

PROCESSES = 2
NUM_HASHES = 128

Removals = dict[int, int]
"""By the number of each document that goes: the one that stays for it."""


class WhiteSpaceWords(WordTokenizer):
    """Words are what stands between white space."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return the words."""
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        """Return sentences; nobody asks."""
        raise NotImplementedError

    span_tokenize = sent_tokenize


def hashed(text: str) -> int:
    """Return the hash that datatrove uses."""
    return xxh64_intdigest(text.encode())


def run_stage(pipeline: list[PipelineStep], tasks: int, logs: Path) -> None:
    """Run one stage in two processes."""
    with silenced():
        LocalPipelineExecutor(pipeline, tasks, min(tasks, PROCESSES), str(logs)).run()


@contextmanager
def silenced() -> Iterator[None]:
    """Throw away what these processes write to standard error: the log of datatrove, which is in files too."""
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def meshtrain_removals(source: Path, place: Path, similarity: float) -> Removals:
    """Deduplicate with meshtrain."""
    config = DeduplicateConfig(similarity=similarity)
    folders = [place / name for name in ("target", "dropped", "work")]
    for number, stage in enumerate(deduplication_stages(source, *folders, config, PROCESSES)):
        begin = time.perf_counter()
        run_stage(list(stage.pipeline), stage.tasks, place / "logs" / str(number))
        print(f"    {stage.name} {time.perf_counter() - begin:.1f} s", flush=True)
    groups = map(json.loads, (place / "dropped" / "groups.jsonl").read_text().splitlines())
    return {int(removed["id"]): int(group["kept"]) for group in groups for removed in group["removed"]}


def datatrove_removals(source: Path, place: Path, similarity: float) -> Removals:
    """Deduplicate with datatrove; its buckets decide alone, whatever similarity is asked."""
    config = MinhashConfig()
    signatures, pairs, clusters, target, dropped = (str(place / name) for name in "spctd")

    def reader() -> PipelineStep:
        return JsonlReader(str(source))

    signer = MinhashDedupSignature(signatures, config, WhiteSpaceWords())
    signer._hash_func = hashed
    stages = [
        ([reader(), signer], PROCESSES),
        ([MinhashDedupBuckets(signatures, pairs, config=config)], config.num_buckets),
        ([MinhashDedupCluster(pairs, clusters, config, save_cluster_id=True)], 1),
        (
            [
                reader(),
                MinhashDedupFilter(clusters, JsonlWriter(dropped), load_cluster_ids=True),
                JsonlWriter(target),
            ],
            PROCESSES,
        ),
    ]
    for number, (pipeline, tasks) in enumerate(stages):
        run_stage(pipeline, tasks, place / "logs" / str(number))
    stays = {cluster: document for document, cluster in _clusters(Path(target)) if cluster >= 0}
    return {document: stays[cluster] for document, cluster in _clusters(Path(dropped))}


def _clusters(directory: Path) -> Iterator[tuple[int, int]]:
    for path in directory.iterdir():
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                record = json.loads(line)
                yield int(record["id"]), record["metadata"]["minhash_cluster_id"]


def rensa_removals(source: Path, place: Path, similarity: float) -> Removals:
    """Deduplicate with rensa: signatures in two processes, the index in one."""
    index = RMinHashLSH(similarity, NUM_HASHES, 16)
    stays: dict[int, RMinHash] = {}
    removals: Removals = {}
    with get_context("fork").Pool(PROCESSES) as pool:
        for shard in pool.imap(_rensa_signatures, sorted(source.iterdir())):
            for document, signature in shard:
                other = next((o for o in index.query(signature) if stays[o].jaccard(signature) >= similarity), None)
                if other is None:
                    index.insert(document, signature)
                    stays[document] = signature
                else:
                    removals[document] = other
    return removals


def _rensa_signatures(shard: Path) -> list[tuple[int, RMinHash]]:
    with gzip.open(shard, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    signatures = RMinHash.from_token_sets([plain_shingles(record["text"]) for record in records], NUM_HASHES, 42)
    return [(int(record["id"]), signature) for record, signature in zip(records, signatures, strict=True)]


CONTENDERS: dict[str, Callable[[Path, Path, float], Removals]] = {
    "meshtrain": meshtrain_removals,
    "datatrove": datatrove_removals,
    "rensa": rensa_removals,
}


def judged(removals: Removals, truth: Pairs, similarity: float, num_documents: int) -> list[str]:
    """Return recall, recall up to 0.1 above the similarity, precision; and how many are removed, wrong, and missed."""
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


def print_row(values: list[str]) -> None:
    """Print one line of the table."""
    print(
        "".join(value.rjust(width) for value, width in zip(values, (10, 8, 8, 9, 9, 11, 9, 7, 8), strict=True)),
        flush=True,
    )


def main() -> None:
    """Build the corpus, find the truth, let the contenders take turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--injected", type=int, default=10_000)
    parser.add_argument("--similarity", type=float, default=0.8)
    parser.add_argument("--tools", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--small", action="store_true", help="a few documents, to see that it works")
    arguments = parser.parse_args()
    size, injected = (300, 100) if arguments.small else (arguments.documents, arguments.injected)
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), size, injected, arguments.similarity, arguments.tools)


def compare(place: Path, size: int, injected: int, similarity: float, tools: list[str]) -> None:
    """Print a line for every contender."""
    # The first pieces of a long list are all of one package: take the same number from everywhere.
    pieces = list(islice(python_documents(), 20 * size))
    texts = with_near_duplicates(random.Random(0).sample(pieces, min(size, len(pieces))), injected)
    del pieces
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    write_corpus(place / "source", texts)
    begin = time.perf_counter()
    truth = similar_pairs(texts, similarity)
    num_documents = len(texts)
    print(
        f"{num_documents} documents, {megabytes:.1f} MB, {len(truth.first)} pairs at {similarity} and above", flush=True
    )
    print(f"    found by comparing all with all in {time.perf_counter() - begin:.1f} s", flush=True)
    del texts
    rows = []
    for tool in tools:
        begin = time.perf_counter()
        removals = CONTENDERS[tool](place / "source", place / tool, similarity)
        seconds = time.perf_counter() - begin
        speed = [f"{num_documents / seconds:.0f}", f"{megabytes / seconds:.1f}"]
        rows.append([tool, *speed, *judged(removals, truth, similarity, num_documents)])
    higher = f"-{similarity + 0.1:.1f}"
    print_row(["tool", "docs/s", "MB/s", "recall", higher, "precision", "removed", "wrong", "missed"])
    for row in rows:
        print_row(row)


if __name__ == "__main__":
    main()
