"""Shuffling in bounded memory, and setting documents aside.

The order is that of a keyed hash of each document: a pure function of the seed and the documents, whatever the shards
and workers. The first stage spreads documents over buckets by the leading bits of the hash, the second one sorts each.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from datatrove.pipeline.base import PipelineStep
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from meshtrain.config.corpus import CorpusConfig, ShuffleConfig, SplitConfig
from meshtrain.corpus.steps.blocks import Documents, ShardPass, shard_names
from meshtrain.corpus.steps.reading import BYTES_PER_MEGABYTE
from meshtrain.corpus.steps.shards import Compression, RollingWriter, ShardWriter, as_document, list_shards, read_lines
from meshtrain.errors import DataError

PARTS = ("train", "validation", "test")
MOST_BUCKETS = 512
"""Each task of the first stage holds a file open for every bucket."""


def shuffling_passes(
    source: Path, target: Path, work: Path, config: CorpusConfig, *, seed: ShuffleConfig, num_bytes: int
) -> list[ShardPass]:
    """Return the stages that put the documents in `source` into a random order.

    Args:
        source: the directory of the shards.
        target: the directory for the shuffled ones.
        work: a directory for the buckets.
        config: how shards are written.
        seed: the seed, and how large a bucket may be.
        num_bytes: of all documents, uncompressed.

    Raises:
        DataError: if there would be more buckets than files can be open.
    """
    num_buckets = math.ceil(num_bytes / (seed.bucket_megabytes * BYTES_PER_MEGABYTE)) or 1
    if num_buckets > MOST_BUCKETS:
        least = math.ceil(num_bytes / BYTES_PER_MEGABYTE / MOST_BUCKETS)
        raise DataError(
            f"shuffle.bucket_megabytes = {seed.bucket_megabytes:g} makes {num_buckets:,} buckets, more than "
            f"{MOST_BUCKETS} files that are written at once; set it to {least} or more"
        )
    shards = list_shards(source)
    scatter = ScatterLines(shards, work, config.compression, seed.seed, num_buckets)
    shard_bytes = config.shard_megabytes * BYTES_PER_MEGABYTE
    sort = SortBucket(work, target, config.compression, seed.seed, shard_bytes)
    return [ShardPass("scatter", [scatter], len(shards)), ShardPass("sort", [sort], num_buckets)]


def split_passes(source: Path, target: Path, config: SplitConfig, compression: Compression) -> list[ShardPass]:
    """Return the stage that writes the documents in `source` into the directories PARTS."""
    shards = list_shards(source)
    return [ShardPass("split", [SplitShards(shards, target, compression, config)], len(shards))]


def order_key(line: bytes, seed: int) -> bytes:
    """Return where a document stands in the shuffled order: 16 bytes, uniform."""
    return xxh3_128_digest(line, seed=seed % 2**64)


def choose_part(text: str, config: SplitConfig) -> str:
    """Return which of PARTS a document belongs to; the same text always to the same."""
    place = xxh3_64_intdigest(text.encode()) / 2**64
    if place < config.validation:
        return "validation"
    return "test" if place < config.validation + config.test else "train"


class ScatterLines(PipelineStep):
    """Spreads the lines of one shard over buckets by their order key."""

    name = "scatter"
    type = "shuffle"

    def __init__(
        self, shards: Sequence[Path], work: Path, compression: Compression, seed: int, num_buckets: int
    ) -> None:
        super().__init__()
        self.shards = tuple(shards)
        self.names = shard_names(shards)
        self.work = work
        self.compression = compression
        self.seed = seed
        self.num_buckets = num_buckets

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the shard of this task into the buckets."""
        with ExitStack() as stack:
            writers = [
                stack.enter_context(ShardWriter(self.work / f"{bucket:05}", self.names[rank], self.compression))
                for bucket in range(self.num_buckets)
            ]
            for line in read_lines(self.shards[rank]):
                leading = int.from_bytes(order_key(line, self.seed)[:8], "big")
                writers[leading * self.num_buckets >> 64].write(line)


class SortBucket(PipelineStep):
    """Sorts the lines of one bucket in memory and writes them into shards."""

    name = "sort"
    type = "shuffle"

    def __init__(self, work: Path, target: Path, compression: Compression, seed: int, shard_bytes: float) -> None:
        super().__init__()
        self.work = work
        self.target = target
        self.compression = compression
        self.seed = seed
        self.shard_bytes = shard_bytes

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the bucket of this task."""
        lines = [line for shard in list_shards(self.work / f"{rank:05}") for line in read_lines(shard)]
        lines.sort(key=lambda line: (order_key(line, self.seed), line))
        with RollingWriter(self.target, f"{rank:05}", self.compression, self.shard_bytes) as writer:
            for line in lines:
                writer.write(line)


class SplitShards(PipelineStep):
    """Writes the lines of one shard into the directories of the parts."""

    name = "split"
    type = "writer"

    def __init__(self, shards: Sequence[Path], target: Path, compression: Compression, config: SplitConfig) -> None:
        super().__init__()
        self.shards = tuple(shards)
        self.names = shard_names(shards)
        self.target = target
        self.compression = compression
        self.config = config

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the shard of this task into the parts."""
        with ExitStack() as stack:
            writers = {
                part: stack.enter_context(ShardWriter(self.target / part, self.names[rank], self.compression))
                for part in PARTS
            }
            for line in read_lines(self.shards[rank]):
                writers[choose_part(as_document(line).text, self.config)].write(line)
