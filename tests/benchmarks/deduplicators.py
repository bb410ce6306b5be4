"""The contenders of the deduplication benchmark."""

import gzip
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

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
from meshtrain.corpus.duplicates.deduplication import deduplication_passes
from meshtrain.corpus.steps.blocks import ShardPass
from tests.benchmarks.duplicates_corpus import plain_shingles

PROCESSES = 2
NUM_HASHES = 128

Removals = dict[int, int]
"""By the number of each document that goes: the one that stays for it."""


class Outcome(NamedTuple):
    """What a contender decided, and how long it took."""

    removals: Removals
    stage_seconds: dict[str, float]


class WhiteSpaceWords(WordTokenizer):
    """Splits words at white space."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return the words."""
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        """Do nothing; sentences are not used."""
        raise NotImplementedError

    span_tokenize = sent_tokenize


def hashed(text: str) -> int:
    """Return the hash that datatrove uses."""
    return xxh64_intdigest(text.encode())


def run_stages(stages: list[ShardPass], logs: Path) -> dict[str, float]:
    """Run stages in two processes, and return the seconds of each."""
    seconds = {}
    for stage in stages:
        begin = time.perf_counter()
        with silenced():
            pipeline, workers = list(stage.pipeline), min(stage.tasks, PROCESSES)
            LocalPipelineExecutor(pipeline, stage.tasks, workers, str(logs / stage.name)).run()
        seconds[stage.name] = time.perf_counter() - begin
    return seconds


@contextmanager
def silenced() -> Iterator[None]:
    """Discard the standard error of these processes: datatrove also writes its log to files."""
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def meshtrain_outcome(source: Path, folder: Path, similarity: float) -> Outcome:
    """Deduplicate with meshtrain."""
    config = DeduplicateConfig(similarity=similarity)
    folders = [folder / name for name in ("target", "dropped", "work")]
    seconds = run_stages(deduplication_passes(source, *folders, config, PROCESSES), folder / "logs")
    groups = map(json.loads, (folder / "dropped" / "groups.jsonl").read_text().splitlines())
    removals = {int(removed["id"]): int(group["kept"]) for group in groups for removed in group["removed"]}
    return Outcome(removals, seconds)


def datatrove_outcome(source: Path, folder: Path, similarity: float) -> Outcome:
    """Deduplicate with datatrove, whose buckets alone decide, regardless of `similarity`."""
    config = MinhashConfig()
    signatures, pairs, clusters, target, dropped = (str(folder / name) for name in "spctd")

    def reader() -> PipelineStep:
        return JsonlReader(str(source))

    signer = MinhashDedupSignature(signatures, config, WhiteSpaceWords())
    signer._hash_func = hashed
    remover = MinhashDedupFilter(clusters, JsonlWriter(dropped), load_cluster_ids=True)
    stages = [
        ShardPass("sign", [reader(), signer], PROCESSES),
        ShardPass("meet", [MinhashDedupBuckets(signatures, pairs, config=config)], config.num_buckets),
        ShardPass("cluster", [MinhashDedupCluster(pairs, clusters, config, save_cluster_id=True)], 1),
        ShardPass("remove", [reader(), remover, JsonlWriter(target)], PROCESSES),
    ]
    seconds = run_stages(stages, folder / "logs")
    stays = {cluster: document for document, cluster in _clusters(Path(target)) if cluster >= 0}
    return Outcome({document: stays[cluster] for document, cluster in _clusters(Path(dropped))}, seconds)


def _clusters(directory: Path) -> Iterator[tuple[int, int]]:
    for path in directory.iterdir():
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                record = json.loads(line)
                yield int(record["id"]), record["metadata"]["minhash_cluster_id"]


def rensa_outcome(source: Path, folder: Path, similarity: float) -> Outcome:
    """Deduplicate with rensa: signatures in two processes, the index in one."""
    begin = time.perf_counter()
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
    return Outcome(removals, {"all": time.perf_counter() - begin})


def _rensa_signatures(shard: Path) -> list[tuple[int, RMinHash]]:
    with gzip.open(shard, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    signatures = RMinHash.from_token_sets([plain_shingles(record["text"]) for record in records], NUM_HASHES, 42)
    return [(int(record["id"]), signature) for record, signature in zip(records, signatures, strict=True)]


CONTENDERS: dict[str, Callable[[Path, Path, float], Outcome]] = {
    "meshtrain": meshtrain_outcome,
    "datatrove": datatrove_outcome,
    "rensa": rensa_outcome,
}
