"""Blocks: the parts of datatrove pipelines that all steps are put together from."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from meshtrain.corpus.steps.shards import Compression, ShardWriter, as_line, read_shard, shard_name

Documents = Iterable[Document]
Judge = Callable[[Document], str | None]
"""Mends a document in place, and returns why it is to be dropped, if it is."""


class ReadShards(PipelineStep):
    """Yields the documents of one shard: task `rank` has shard `rank`."""

    name = "shards"
    type = "reader"

    def __init__(self, shards: Sequence[Path]) -> None:
        super().__init__()
        self.shards = tuple(shards)

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of the shard of this task."""
        return read_shard(self.shards[rank])


class WriteShards(PipelineStep):
    """Writes the documents of a task into a shard of the given name."""

    name = "shards"
    type = "writer"

    def __init__(self, directory: Path, names: Sequence[str], compression: Compression) -> None:
        super().__init__()
        self.directory = directory
        self.names = tuple(names)
        self.compression = compression

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Write and pass on."""
        with ShardWriter(self.directory, self.names[rank], self.compression) as writer:
            for document in data or ():
                writer.write(as_line(document))
                yield document


class Sieve(PipelineStep):
    """Passes on the documents that a judge keeps, and writes the others down with the reason.

    Args:
        build_judge: called in the process of the task, where a model may be loaded.
        dropped: the directory for the others.
        names: of the shards of the tasks.
        compression: of what is written.
    """

    name = "judge"
    type = "sieve"

    def __init__(
        self, build_judge: Callable[[], Judge], dropped: Path, names: Sequence[str], compression: Compression
    ) -> None:
        super().__init__()
        self.build_judge = build_judge
        self.dropped = dropped
        self.names = tuple(names)
        self.compression = compression

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that are kept."""
        judge = self.build_judge()
        with ShardWriter(self.dropped, self.names[rank], self.compression) as dropped:
            for document in data or ():
                reason = judge(document)
                if reason is None:
                    yield document
                else:
                    dropped.write(dropped_line(document, reason))


class Scatter(PipelineStep):
    """Spreads the documents of a task over buckets: directories, in which each task has a shard of its own."""

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
        """Write and pass on."""
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
    """Write a dropped document as a line."""
    more = {"reason": reason} if detail is None else {"reason": reason, "detail": detail}
    return as_line(Document(text=document.text, id=document.id, metadata={**document.metadata, **more}))


def names_of(shards: Sequence[Path]) -> list[str]:
    """Return the names under which the shards of the next step are written."""
    return [shard_name(path) for path in shards]
