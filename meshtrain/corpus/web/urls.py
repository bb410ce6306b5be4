"""The step `urls`: links are normalized, and unwanted and repeated ones are dropped.

All links of a host go into one shard. So only one task visits the host, and can limit its requests.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from xxhash import xxh3_64_intdigest

from meshtrain.config.corpus import CorpusConfig, DownloadConfig, UrlsConfig
from meshtrain.console import BYTES_PER_MB
from meshtrain.corpus.steps.blocks import Documents, Filter, FilterDocuments, ShardPass, WriteBuckets, WriteShards
from meshtrain.corpus.steps.reading import group_files, relative_names
from meshtrain.corpus.steps.records import read_text_lines
from meshtrain.corpus.steps.shards import list_shards, read_shard
from meshtrain.corpus.web.link_rules import load_rules
from meshtrain.data.text.sources import SourceFile
from meshtrain.errors import DataError

DUPLICATE = "duplicate"


def link_passes(
    files: Sequence[SourceFile], target: Path, dropped: Path, work: Path, config: CorpusConfig
) -> list[ShardPass]:
    """Return the passes that filter lists of links.

    Args:
        files: the lists, one link per line.
        target: the directory for the links to fetch.
        dropped: the directory for the dropped links.
        work: a directory for the files between the passes.
        config: the corpus file, with `urls`.

    Raises:
        DataError: if a list is not a text file.
    """
    assert config.urls is not None
    for file in files:
        if not str(file.kind).startswith("txt"):
            raise DataError(f"urls.lists: {file.path} is not a .txt file", "give files with one link per line")
    groups = group_files(files, config.shard_megabytes * BYTES_PER_MB)
    names = [f"sorted-{rank:05}" for rank in range(len(groups))]
    num_shards = (config.download or DownloadConfig()).shards
    build = partial(build_url_filter, config.urls)
    first = [
        ReadLinks(groups),
        FilterDocuments(build, dropped, names, config.compression),
        WriteBuckets(work, names, config.compression, partial(_shard_of, num_shards=num_shards)),
    ]
    bucket_names = [f"{shard:05}" for shard in range(num_shards)]
    second = [
        ReadBucket(work),
        FilterDocuments(
            _build_duplicate_filter, dropped, [f"repeated-{name}" for name in bucket_names], config.compression
        ),
        WriteShards(target, bucket_names, config.compression),
    ]
    return [ShardPass("filter", first, len(groups)), ShardPass("duplicates", second, num_shards)]


def build_url_filter(config: UrlsConfig) -> Filter:
    """Return the filter that normalizes a link and returns the reason to drop it."""
    rules = load_rules(config.blacklisted_domains, config.blacklisted_extensions)

    def normalize(document: Document) -> str | None:
        url, reason = rules.normalize(document.metadata["url"])
        document.metadata["url"] = url
        return reason

    return normalize


def _build_duplicate_filter() -> Filter:
    seen: set[str] = set()

    def find_repetition(document: Document) -> str | None:
        url = document.metadata["url"]
        if url in seen:
            return DUPLICATE
        seen.add(url)
        return None

    return find_repetition


def _shard_of(document: Document, num_shards: int) -> str:
    host = urlsplit(document.metadata["url"]).hostname or ""
    return f"{xxh3_64_intdigest(host.encode()) % num_shards:05}"


class ReadLinks(PipelineStep):
    """Yields the links of one group of lists."""

    name = "links"
    type = "reader"

    def __init__(self, groups: Sequence[Sequence[SourceFile]]) -> None:
        super().__init__()
        self.groups = groups
        self.names = relative_names(file for group in groups for file in group)

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield a document without text for every line with a link."""
        num_links = 0
        for file in self.groups[rank]:
            for number, line in enumerate(read_text_lines(file), 1):
                if link := line.strip():
                    num_links += 1
                    yield Document(text="", id=f"{self.names[str(file.path)]}:{number}", metadata={"url": link})
        self.stat_update("in", value=num_links)


class ReadBucket(PipelineStep):
    """Yields the documents of one bucket, in the order of the tasks that wrote them."""

    name = "bucket"
    type = "reader"

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of the bucket of this task."""
        for shard in list_shards(self.directory / f"{rank:05}"):
            yield from read_shard(shard)
