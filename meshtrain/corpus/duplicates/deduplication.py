"""The steps of deduplication, as blocks that datatrove's executors run.

Each task reads what the step before has left on disk and writes files that are there completely or not at all: a task
that was killed is done again from its beginning, and writes the same bytes.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.typeshelper import StatHints

from meshtrain.corpus.duplicates.buckets import MEETING, MEETINGS_AT_ONCE, Components, find_meetings, write_parts
from meshtrain.corpus.duplicates.minhash import Bands
from meshtrain.corpus.duplicates.shingles import shingles_of
from meshtrain.corpus.duplicates.sketches import SKETCHES, Sketches, SketchWriter, mapped, written_file, written_whole
from meshtrain.corpus.duplicates.verdicts import VERDICT, Judge
from meshtrain.corpus.steps.lines import compression_of, existing_shards, understood
from meshtrain.corpus.steps.shards import GROUPS_NAME, ShardWriter, read_lines, shard_name
from meshtrain.errors import DataError

CHARACTERS_AT_ONCE = 1 << 19
"""Texts of this length together are hashed at once: the arrays stay in the processor's cache."""

REMOVAL = np.dtype([*VERDICT.descr, ("group", "<i8")])
"""A verdict, and the number of the group."""


class DeduplicationStep(PipelineStep):
    """What the steps have in common: they share files and not a stream of documents."""

    type = "DEDUPLICATION"

    def __init__(self, source: Path, work: Path) -> None:
        super().__init__()
        self.source = source
        self.work = work

    def sketches(self) -> Sketches:
        """Return the sketches of all shards."""
        return Sketches(self.work, [shard.name for shard in existing_shards(self.source)])

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Do one task's share."""
        with self.track_time("task"):
            self.work_on(rank, world_size)

    def work_on(self, rank: int, world_size: int) -> None:
        """Do the share of task `rank` of `world_size`."""
        raise NotImplementedError


class SketchDocuments(DeduplicationStep):
    """Compute and keep what is needed of every document: its shingles and its MinHash signature."""

    name = "sketch documents"

    def __init__(self, source: Path, work: Path, bands: Bands, ngram: int) -> None:
        super().__init__(source, work)
        self.bands = bands
        self.ngram = ngram

    def work_on(self, rank: int, world_size: int) -> None:
        """Write the sketches of every shard of this task."""
        for shard in existing_shards(self.source)[rank::world_size]:
            writer = SketchWriter(self.work / SKETCHES / shard.name, self.bands)
            with writer.opened():
                for texts, identifiers in _batches(shard):
                    shingles = shingles_of(texts, self.ngram)
                    writer.add(identifiers, shingles)
                    self.stat_update("shingles", value=len(shingles.hashes), unit="batch")


def _batches(shard: Path) -> Iterator[tuple[list[str], list[str]]]:
    texts: list[str] = []
    identifiers: list[str] = []
    num_characters = 0
    for place, line in enumerate(read_lines(shard)):
        document = understood(line, shard, place)
        texts.append(document["text"])
        identifiers.append(document["id"])
        num_characters += len(texts[-1])
        if num_characters >= CHARACTERS_AT_ONCE:
            yield texts, identifiers
            texts, identifiers, num_characters = [], [], 0
    yield texts, identifiers


class FindMeetings(DeduplicationStep):
    """Find which documents meet in the buckets of each band."""

    name = "find meetings"

    def __init__(self, source: Path, work: Path, num_bands: int) -> None:
        super().__init__(source, work)
        self.num_bands = num_bands

    def work_on(self, rank: int, world_size: int) -> None:
        """Write the meetings of every band of this task."""
        sketches = self.sketches()
        for band in range(self.num_bands)[rank::world_size]:
            with written_file(_meetings_file(self.work, band)) as file:
                for meetings in find_meetings(sketches, band):
                    meetings.tofile(file)
                    self.stat_update("meetings", value=len(meetings), unit="range")


class ConnectMeetings(DeduplicationStep):
    """Sort the meetings into parts that have nothing to do with each other."""

    name = "connect meetings"

    def __init__(self, source: Path, work: Path, num_bands: int, num_parts: int) -> None:
        super().__init__(source, work)
        self.num_bands = num_bands
        self.num_parts = num_parts

    def work_on(self, rank: int, world_size: int) -> None:
        """Write the parts."""
        meetings = [mapped(_meetings_file(self.work, band), MEETING) for band in range(self.num_bands)]
        components = Components(self.sketches().num_documents)
        for band in meetings:
            components.unite(band)
        num_parts = max(self.num_parts, sum(map(len, meetings)) // MEETINGS_AT_ONCE)
        with written_whole(self.work / "parts") as partial:
            write_parts(meetings, components, partial, num_parts)


class CompareDocuments(DeduplicationStep):
    """Compare the documents that meet, and decide which of them go."""

    name = "compare documents"

    def __init__(self, source: Path, work: Path, bands: Bands, similarity: float) -> None:
        super().__init__(source, work)
        self.similarity = similarity
        self.least_agreement = bands.least_agreement(similarity)

    def work_on(self, rank: int, world_size: int) -> None:
        """Write the verdicts on every part of this task."""
        judge = Judge(self.sketches(), self.similarity, self.least_agreement)
        for part in sorted((self.work / "parts").iterdir())[rank::world_size]:
            with written_file(self.work / "verdicts" / part.name) as file:
                judge.judge(mapped(part, MEETING)).tofile(file)
        self.stat_update("comparisons", value=judge.num_comparisons, unit="task")


class WriteGroups(DeduplicationStep):
    """Number the groups, and write them down as evidence."""

    name = "write groups"

    def __init__(self, source: Path, work: Path, dropped: Path) -> None:
        super().__init__(source, work)
        self.dropped = dropped

    def work_on(self, rank: int, world_size: int) -> None:
        """Write `groups.jsonl`, and the removals by document."""
        parts = sorted((self.work / "parts").iterdir())
        verdicts = np.concatenate([mapped(self.work / "verdicts" / part.name, VERDICT) for part in parts])
        removals = np.empty(len(verdicts), REMOVAL)
        for field in VERDICT.names or ():
            removals[field] = verdicts[field]
        _, removals["group"] = np.unique(removals["kept"], return_inverse=True)
        removals.sort(order=("group", "document"))
        with written_file(self.dropped / GROUPS_NAME) as file:
            for line in _groups(removals, self.sketches()):
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
                self.stat_update("groups")
        removals.sort(order="document")
        with written_file(self.work / "removals.bin") as file:
            removals.tofile(file)


def _groups(removals: np.ndarray, sketches: Sketches) -> Iterator[dict[str, object]]:
    borders = np.flatnonzero(np.diff(removals["group"])) + 1
    for group in np.split(removals, borders) if len(removals) else ():
        removed = [
            {"id": sketches.identifier(int(removal["document"])), "similarity": float(removal["similarity"])}
            for removal in group
        ]
        kept = sketches.identifier(int(group["kept"][0]))
        yield {"group": int(group["group"][0]), "kept": kept, "removed": removed}


class RemoveDuplicates(DeduplicationStep):
    """Part the documents that stay from those that go."""

    name = "remove duplicates"

    def __init__(self, source: Path, target: Path, dropped: Path, work: Path) -> None:
        super().__init__(source, work)
        self.target = target
        self.dropped = dropped

    def work_on(self, rank: int, world_size: int) -> None:
        """Write both shards for every shard of this task."""
        shards = existing_shards(self.source)
        sketches = self.sketches()
        removals = mapped(self.work / "removals.bin", REMOVAL)
        for number in range(len(shards))[rank::world_size]:
            first, end = sketches.first_documents[number : number + 2].tolist()
            begin, stop = np.searchsorted(removals["document"], (first, end))
            reasons = {
                int(removal["document"]) - first: self._reason(removal, sketches) for removal in removals[begin:stop]
            }
            self._part(shards[number], end - first, reasons)

    def _part(self, shard: Path, num_documents: int, reasons: dict[int, dict[str, object]]) -> None:
        name, compression = shard_name(shard), compression_of(shard)
        place = -1
        with (
            ShardWriter(self.target, name, compression) as target,
            ShardWriter(self.dropped, name, compression) as dropped,
        ):
            for place, line in enumerate(read_lines(shard)):
                if place in reasons:
                    dropped.write(_dropped_line(understood(line, shard, place), reasons[place]))
                else:
                    target.write(line)
            if place + 1 != num_documents:
                raise DataError(
                    f"{shard}: {place + 1} documents, and {num_documents} when they were compared; "
                    "deduplicate again from the start, and let nothing write to the shards meanwhile"
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
    return (
        json.dumps(document | reason, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass") + b"\n"
    )


def _meetings_file(work: Path, band: int) -> Path:
    return work / "meetings" / f"{band:03d}.bin"
