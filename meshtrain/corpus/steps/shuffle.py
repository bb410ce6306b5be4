"""The step `shuffle`, which sorts documents in bounded memory, and the step `split`.

Documents are sorted by a keyed hash. So the order depends only on the seed and the documents, not
on the shards or workers. The first pass distributes documents over buckets by the leading bits of
the hash. The second pass sorts each bucket.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from datatrove.pipeline.base import PipelineStep
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from meshtrain.config.corpus import CorpusConfig, ShuffleConfig, SplitConfig
from meshtrain.console import BYTES_PER_MB
from meshtrain.corpus.steps.blocks import Documents, ShardPass, shard_names
from meshtrain.corpus.steps.shards import Compression, RollingWriter, ShardWriter, as_document, list_shards, read_lines
from meshtrain.errors import DataError

PARTS = ("train", "validation", "test")
MAX_BUCKETS = 512
"""Each task of the first pass keeps one file open for every bucket."""


def shuffling_passes(
    source: Path, target: Path, work: Path, config: CorpusConfig, *, shuffle: ShuffleConfig, num_bytes: int
) -> list[ShardPass]:
    """Return the passes that put the documents in `source` into a random order.

    Args:
        source: the directory of the shards.
        target: the directory for the shuffled shards.
        work: a directory for the buckets.
        config: the compression and the size of shards.
        shuffle: the seed, and the size of a bucket.
        num_bytes: the uncompressed size of all documents.

    Raises:
        DataError: if there would be more than MAX_BUCKETS buckets.
    """
    num_buckets = math.ceil(num_bytes / (shuffle.bucket_megabytes * BYTES_PER_MB)) or 1
    if num_buckets > MAX_BUCKETS:
        least = math.ceil(num_bytes / BYTES_PER_MB / MAX_BUCKETS)
        raise DataError(
            f"shuffle.bucket_megabytes = {shuffle.bucket_megabytes:g} makes {num_buckets:,} buckets, more than "
            f"{MAX_BUCKETS} files that one task may write at once",
            f"set it to {least} or more",
        )
    shards = list_shards(source)
    scatter = ScatterLines(shards, work, config.compression, shuffle.seed, num_buckets)
    shard_bytes = config.shard_megabytes * BYTES_PER_MB
    sort = SortBucket(work, target, config.compression, shuffle.seed, shard_bytes)
    return [ShardPass("scatter", [scatter], len(shards)), ShardPass("sort", [sort], num_buckets)]


def split_passes(source: Path, target: Path, config: SplitConfig, compression: Compression) -> list[ShardPass]:
    """Return the pass that writes the documents in `source` into the directories PARTS."""
    shards = list_shards(source)
    return [ShardPass("split", [SplitShards(shards, target, compression, config)], len(shards))]


def order_key(line: bytes, seed: int) -> bytes:
    """Return the sort key of a document: 16 bytes, uniformly distributed."""
    return xxh3_128_digest(line, seed=seed % 2**64)


def choose_part(text: str, config: SplitConfig) -> str:
    """Return which of PARTS a text belongs to. The same text always belongs to the same part."""
    fraction = xxh3_64_intdigest(text.encode()) / 2**64
    if fraction < config.validation:
        return "validation"
    return "test" if fraction < config.validation + config.test else "train"


class ScatterLines(PipelineStep):
    """Distributes the lines of one shard over buckets by their order key."""

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
    """Writes the lines of one shard into the directories of PARTS."""

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
        """Write each line of the shard of this task into its part."""
        with ExitStack() as stack:
            writers = {
                part: stack.enter_context(ShardWriter(self.target / part, self.names[rank], self.compression))
                for part in PARTS
            }
            for line in read_lines(self.shards[rank]):
                writers[choose_part(as_document(line).text, self.config)].write(line)
