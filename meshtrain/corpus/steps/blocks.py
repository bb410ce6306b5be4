"""Blocks of datatrove pipelines that all steps are built from, and the pass that runs them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from meshtrain.corpus.steps.shards import Compression, ShardWriter, as_line, read_shard, shard_name

Documents = Iterable[Document]
Filter = Callable[[Document], str | None]
"""Edits a document in place. Returns the reason to drop it, or None to keep it."""


@dataclass(frozen=True)
class ShardPass:
    """One pass over shards of documents. The passes of a step run one after another."""

    name: str
    pipeline: Sequence[PipelineStep | Callable[..., Any]]
    """The datatrove blocks of the pass."""
    tasks: int
    """Number of tasks that share the work."""


class ReadShards(PipelineStep):
    """Yields the documents of one shard: task `rank` reads shard `rank`."""

    name = "shards"
    type = "reader"

    def __init__(self, shards: Sequence[Path]) -> None:
        super().__init__()
        self.shards = tuple(shards)

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of the shard of this task."""
        return read_shard(self.shards[rank])


class WriteShards(PipelineStep):
    """Writes the documents of a task into one shard.

    Args:
        directory: the directory of the shards.
        names: the name of the shard of each task.
        compression: the compression of the shards.
    """

    name = "shards"
    type = "writer"

    def __init__(self, directory: Path, names: Sequence[str], compression: Compression) -> None:
        super().__init__()
        self.directory = directory
        self.names = tuple(names)
        self.compression = compression

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Write every document, and yield it."""
        with ShardWriter(self.directory, self.names[rank], self.compression) as writer:
            for document in data or ():
                writer.write(as_line(document))
                yield document


class FilterDocuments(PipelineStep):
    """Yields the documents that a filter keeps, and writes the others with their reason.

    Args:
        build_filter: builds the filter in the process of the task, where it may load a model.
        dropped: the directory for dropped documents.
        names: the name of the shard of dropped documents of each task.
        compression: the compression of these shards.
    """

    name = "filter"
    type = "filter"

    def __init__(
        self, build_filter: Callable[[], Filter], dropped: Path, names: Sequence[str], compression: Compression
    ) -> None:
        super().__init__()
        self.build_filter = build_filter
        self.dropped = dropped
        self.names = tuple(names)
        self.compression = compression

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that are kept."""
        drop_reason = self.build_filter()
        with ShardWriter(self.dropped, self.names[rank], self.compression) as dropped:
            for document in data or ():
                reason = drop_reason(document)
                if reason is None:
                    yield document
                else:
                    dropped.write(dropped_line(document, reason))


class WriteBuckets(PipelineStep):
    """Distributes the documents of a task over buckets.

    A bucket is a directory, in which each task writes a shard of its own.
    """

    name = "buckets"
    type = "writer"

    def __init__(
        self, directory: Path, names: Sequence[str], compression: Compression, bucket_of: Callable[[Document], str]
    ) -> None:
        super().__init__()
        self.directory = directory
        self.names = tuple(names)
        self.compression = compression
        self.bucket_of = bucket_of

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Write every document into its bucket, and yield it."""
        writers: dict[str, ShardWriter] = {}
        with ExitStack() as stack:
            for document in data or ():
                bucket = self.bucket_of(document)
                if bucket not in writers:
                    writer = ShardWriter(self.directory / bucket, self.names[rank], self.compression)
                    writers[bucket] = stack.enter_context(writer)
                writers[bucket].write(as_line(document))
                yield document


def dropped_line(document: Document, reason: str, detail: str | None = None) -> bytes:
    """Return the line of a dropped document."""
    more = {"reason": reason} if detail is None else {"reason": reason, "detail": detail}
    return as_line(Document(text=document.text, id=document.id, metadata={**document.metadata, **more}))


def shard_names(shards: Sequence[Path]) -> list[str]:
    """Return the names that the next step gives to its shards."""
    return [shard_name(path) for path in shards]
