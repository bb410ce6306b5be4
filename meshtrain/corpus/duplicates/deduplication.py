"""The step `deduplicate`, which removes near duplicates.

MinHash finds candidates, and an exact comparison decides. One document of each group is kept.

The work is divided like datatrove's own deduplication (signatures, buckets, clusters, filter), and
it runs on datatrove's executors. Two things differ. Candidates are compared exactly, so no document
is removed whose similarity is below the threshold. A group holds the documents that are similar to
the kept one, where datatrove's clusters hold all documents that a chain of pairs connects.

Each task reads the files of the pass before and writes files that appear only when they are
complete. A killed task starts from its beginning again and writes the same bytes.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.typeshelper import StatHints

from meshtrain.config.corpus import DeduplicateConfig
from meshtrain.corpus.duplicates.buckets import (
    BUCKET_ENTRY,
    ENTRIES_AT_ONCE,
    Components,
    find_shared_buckets,
    write_parts,
)
from meshtrain.corpus.duplicates.comparison import DUPLICATE, DuplicateFinder
from meshtrain.corpus.duplicates.minhash import Bands, choose_bands
from meshtrain.corpus.duplicates.shingles import shingles_of
from meshtrain.corpus.duplicates.sketches import (
    SKETCHES,
    Sketches,
    SketchWriter,
    atomic_directory,
    atomic_file,
    map_array,
)
from meshtrain.corpus.steps.blocks import ShardPass
from meshtrain.corpus.steps.shards import (
    GROUPS_NAME,
    ShardWriter,
    compression_of,
    existing_shards,
    parse_document,
    read_lines,
    shard_name,
)
from meshtrain.errors import DataError

CHARACTERS_AT_ONCE = 1 << 19
"""Texts of about this total length are hashed at once, so the arrays fit the processor's cache."""

REMOVAL = np.dtype([*DUPLICATE.descr, ("group", "<i8")])
"""A duplicate, and the number of its group."""


def deduplication_passes(
    source: Path, target: Path, dropped: Path, work: Path, config: DeduplicateConfig, tasks: int
) -> list[ShardPass]:
    """Return the passes that remove near duplicates; each needs the ones before it.

    The result depends only on the documents and their order, not on the number of tasks or workers.

    Args:
        source: a directory of shards. Every line has the keys `text` and `id`.
        target: gets shards of the same names with the kept documents, byte for byte.
        dropped: gets shards of the same names with the removed documents and the reasons, and
            `groups.jsonl` with the groups as evidence.
        work: a directory for intermediate files. A document needs about 8 bytes for each of its
            shingles, and 450 more.
        config: which documents count as similar.
        tasks: the number of tasks that share the work of a pass.
    """
    bands = choose_bands(config)
    blocks: list[tuple[str, PipelineStep, int]] = [
        ("sketch", SketchDocuments(source, work, bands, config.ngram), tasks),
        ("bucket", FindSharedBuckets(source, work, bands.num_bands), tasks),
        ("partition", PartitionBuckets(source, work, bands.num_bands, tasks), 1),
        ("compare", CompareDocuments(source, work, bands, config.similarity), tasks),
        ("group", WriteGroups(source, work, dropped), 1),
        ("remove", RemoveDuplicates(source, target, dropped, work), tasks),
    ]
    return [ShardPass(name, [block], num_tasks) for name, block, num_tasks in blocks]


class DeduplicationBlock(PipelineStep):
    """Base of the blocks. They exchange files, and do not yield documents."""

    type = "DEDUPLICATION"

    def __init__(self, source: Path, work: Path) -> None:
        super().__init__()
        self.source = source
        self.work = work

    def sketches(self) -> Sketches:
        """Return the sketches of all shards."""
        return Sketches(self.work, [shard.name for shard in existing_shards(self.source)])

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Do the share of one task, and measure its time."""
        with self.track_time("task"):
            self.run_task(rank, world_size)

    def run_task(self, rank: int, world_size: int) -> None:
        """Do the share of task `rank` of `world_size`."""
        raise NotImplementedError


class SketchDocuments(DeduplicationBlock):
    """Computes and stores the shingles and the MinHash signature of every document."""

    name = "sketch documents"

    def __init__(self, source: Path, work: Path, bands: Bands, ngram: int) -> None:
        super().__init__(source, work)
        self.bands = bands
        self.ngram = ngram

    def run_task(self, rank: int, world_size: int) -> None:
        """Write the sketches of every shard of this task."""
        for shard in existing_shards(self.source)[rank::world_size]:
            writer = SketchWriter(self.work / SKETCHES / shard.name, self.bands)
            with writer.open():
                for texts, identifiers in _batches(shard):
                    shingles = shingles_of(texts, self.ngram)
                    writer.add(identifiers, shingles)
                    self.stat_update("shingles", value=len(shingles.hashes), unit="batch")


def _batches(shard: Path) -> Iterator[tuple[list[str], list[str]]]:
    texts: list[str] = []
    identifiers: list[str] = []
    num_characters = 0
    for position, line in enumerate(read_lines(shard)):
        document = parse_document(line, shard, position)
        texts.append(document["text"])
        identifiers.append(document["id"])
        num_characters += len(texts[-1])
        if num_characters >= CHARACTERS_AT_ONCE:
            yield texts, identifiers
            texts, identifiers, num_characters = [], [], 0
    yield texts, identifiers


class FindSharedBuckets(DeduplicationBlock):
    """Finds the buckets of each band that hold several documents."""

    name = "find shared buckets"

    def __init__(self, source: Path, work: Path, num_bands: int) -> None:
        super().__init__(source, work)
        self.num_bands = num_bands

    def run_task(self, rank: int, world_size: int) -> None:
        """Write the bucket entries of every band of this task."""
        sketches = self.sketches()
        for band in range(self.num_bands)[rank::world_size]:
            with atomic_file(_entries_file(self.work, band)) as file:
                for entries in find_shared_buckets(sketches, band):
                    entries.tofile(file)
                    self.stat_update("bucket entries", value=len(entries), unit="range")


class PartitionBuckets(DeduplicationBlock):
    """Divides the bucket entries into parts that can be compared independently."""

    name = "partition buckets"

    def __init__(self, source: Path, work: Path, num_bands: int, num_parts: int) -> None:
        super().__init__(source, work)
        self.num_bands = num_bands
        self.num_parts = num_parts

    def run_task(self, rank: int, world_size: int) -> None:
        """Write the parts."""
        bands = [map_array(_entries_file(self.work, band), BUCKET_ENTRY) for band in range(self.num_bands)]
        components = Components(self.sketches().num_documents)
        for entries in bands:
            components.unite(entries)
        num_parts = max(self.num_parts, sum(map(len, bands)) // ENTRIES_AT_ONCE)
        with atomic_directory(self.work / "parts") as temporary:
            write_parts(bands, components, temporary, num_parts)


class CompareDocuments(DeduplicationBlock):
    """Compares documents that share a bucket, and decides which are duplicates."""

    name = "compare documents"

    def __init__(self, source: Path, work: Path, bands: Bands, similarity: float) -> None:
        super().__init__(source, work)
        self.similarity = similarity
        self.least_agreement = bands.least_agreement(similarity)

    def run_task(self, rank: int, world_size: int) -> None:
        """Write the duplicates in every part of this task."""
        finder = DuplicateFinder(self.sketches(), self.similarity, self.least_agreement)
        for part in sorted((self.work / "parts").iterdir())[rank::world_size]:
            with atomic_file(self.work / "duplicates" / part.name) as file:
                finder.find(map_array(part, BUCKET_ENTRY)).tofile(file)
        self.stat_update("comparisons", value=finder.num_comparisons, unit="task")


class WriteGroups(DeduplicationBlock):
    """Numbers the groups, and writes them as evidence."""

    name = "write groups"

    def __init__(self, source: Path, work: Path, dropped: Path) -> None:
        super().__init__(source, work)
        self.dropped = dropped

    def run_task(self, rank: int, world_size: int) -> None:
        """Write `groups.jsonl`, and the removals sorted by document."""
        parts = sorted((self.work / "parts").iterdir())
        duplicates = np.concatenate([map_array(self.work / "duplicates" / part.name, DUPLICATE) for part in parts])
        removals = np.empty(len(duplicates), REMOVAL)
        for field in DUPLICATE.names or ():
            removals[field] = duplicates[field]
        _, removals["group"] = np.unique(removals["kept"], return_inverse=True)
        removals.sort(order=("group", "document"))
        with atomic_file(self.dropped / GROUPS_NAME) as file:
            for line in _groups(removals, self.sketches()):
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
                self.stat_update("groups")
        removals.sort(order="document")
        with atomic_file(self.work / "removals.bin") as file:
            removals.tofile(file)


def _groups(removals: np.ndarray, sketches: Sketches) -> Iterator[dict[str, object]]:
    boundaries = np.flatnonzero(np.diff(removals["group"])) + 1
    for group in np.split(removals, boundaries) if len(removals) else ():
        removed = [
            {"id": sketches.identifier(int(removal["document"])), "similarity": float(removal["similarity"])}
            for removal in group
        ]
        kept = sketches.identifier(int(group["kept"][0]))
        yield {"group": int(group["group"][0]), "kept": kept, "removed": removed}


class RemoveDuplicates(DeduplicationBlock):
    """Separates the kept documents from the removed ones."""

    name = "remove duplicates"

    def __init__(self, source: Path, target: Path, dropped: Path, work: Path) -> None:
        super().__init__(source, work)
        self.target = target
        self.dropped = dropped

    def run_task(self, rank: int, world_size: int) -> None:
        """Write the kept and the removed documents of every shard of this task."""
        shards = existing_shards(self.source)
        sketches = self.sketches()
        removals = map_array(self.work / "removals.bin", REMOVAL)
        for number in range(len(shards))[rank::world_size]:
            first, end = sketches.first_documents[number : number + 2].tolist()
            begin, stop = np.searchsorted(removals["document"], (first, end))
            reasons = {
                int(removal["document"]) - first: self._reason(removal, sketches) for removal in removals[begin:stop]
            }
            self._separate(shards[number], end - first, reasons)

    def _separate(self, shard: Path, num_documents: int, reasons: dict[int, dict[str, object]]) -> None:
        name, compression = shard_name(shard), compression_of(shard)
        position = -1
        with (
            ShardWriter(self.target, name, compression) as target,
            ShardWriter(self.dropped, name, compression) as dropped,
        ):
            for position, line in enumerate(read_lines(shard)):
                if position in reasons:
                    dropped.write(_dropped_line(parse_document(line, shard, position), reasons[position]))
                else:
                    target.write(line)
            if position + 1 != num_documents:
                raise DataError(
                    f"{shard} holds {position + 1} documents, but held {num_documents} when they were compared",
                    "run the step again from the start (--redo deduplicate), and let nothing write to the shards "
                    "meanwhile",
                )
        self.stat_update(StatHints.total, value=num_documents, unit="shard")
        self.stat_update(StatHints.forwarded, value=num_documents - len(reasons), unit="shard")
        self.stat_update(StatHints.dropped, value=len(reasons), unit="shard")

    def _reason(self, removal: np.void, sketches: Sketches) -> dict[str, object]:
        similarity = float(removal["similarity"])
        return {
            "reason": "near duplicate",
            "detail": f"of {sketches.identifier(int(removal['kept']))}, similarity {similarity:.2f}",
            "similarity": similarity,
            "group": int(removal["group"]),
        }


def _dropped_line(document: dict[str, object], reason: dict[str, object]) -> bytes:
    line = json.dumps(document | reason, ensure_ascii=False, separators=(",", ":"))
    return line.encode(errors="surrogatepass") + b"\n"


def _entries_file(work: Path, band: int) -> Path:
    return work / "buckets" / f"{band:03d}.bin"
