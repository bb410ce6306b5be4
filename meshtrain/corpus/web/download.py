"""The step `download`: every link becomes a document, or is dropped with a reason.

Each task has the links of some hosts. It keeps a journal with a line for each finished link, so
that a restarted task fetches no link twice. When all links are finished, the journal is copied into
shards, in the order of the links.
"""

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from meshtrain.config.corpus import DownloadConfig
from meshtrain.corpus.steps.blocks import Documents, ShardPass, dropped_line, shard_names
from meshtrain.corpus.steps.shards import Compression, ShardWriter, as_line, list_shards, read_shard
from meshtrain.corpus.web.extractor import Extractor
from meshtrain.corpus.web.fetch import Fetcher
from meshtrain.corpus.web.responses import CONNECTION, TIME_OUT, PageError
from meshtrain.errors import UserError

UNRESPONSIVE_HOST = "host does not answer"
MAX_UNANSWERED_PAGES = 5
"""After this number of unanswered pages in a row, the other links of a host are dropped.

Each of them would take minutes."""


def download_passes(
    source: Path,
    target: Path,
    dropped: Path,
    work: Path,
    config: DownloadConfig,
    *,
    compression: Compression,
    workers: int,
) -> list[ShardPass]:
    """Return the pass that fetches the links in `source`.

    Args:
        source: the directory of the shards of links.
        target: the directory for the documents.
        dropped: the directory for the links that gave no document.
        work: a directory for the journals.
        config: the limits.
        compression: the compression of the shards.
        workers: the number of simultaneous tasks, which share the limit on all requests.
    """
    shards = list_shards(source)
    concurrent = max(1, config.concurrent // min(workers, len(shards)))
    block = DownloadPages(shards, target, dropped, work, config, compression=compression, concurrent=concurrent)
    return [ShardPass("download", [block], len(shards))]


class Journal:
    """The finished links of one task, in a file.

    Args:
        path: the file. An incomplete last line, which a killed process left, is cut off.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._offsets: dict[int, int] = {}
        self._file: BinaryIO = path.open("a+b")
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            self._offsets[json.loads(line)["position"]] = end
            end += len(line)
        self._file.truncate(end)
        self._end = end

    def __contains__(self, position: int) -> bool:
        return position in self._offsets

    def add(self, position: int, outcome: dict[str, Any]) -> None:
        """Write the outcome of the link at a position."""
        line = json.dumps({"position": position, **outcome}).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        self._offsets[position] = self._end
        self._end += len(line)

    def read(self, position: int) -> dict[str, Any]:
        """Return the outcome of the link at a position."""
        self._file.seek(self._offsets[position])
        return json.loads(self._file.readline())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class DownloadPages(PipelineStep):
    """Fetches the links of one shard, and writes the documents and the dropped links."""

    name = "pages"
    type = "download"

    def __init__(
        self,
        shards: Sequence[Path],
        target: Path,
        dropped: Path,
        work: Path,
        config: DownloadConfig,
        *,
        compression: Compression,
        concurrent: int,
    ) -> None:
        super().__init__()
        self.shards = tuple(shards)
        self.names = shard_names(shards)
        self.target = target
        self.dropped = dropped
        self.work = work
        self.config = config
        self.compression = compression
        self.concurrent = concurrent
        self._num_unanswered: defaultdict[str, int] = defaultdict(int)

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents in the order of the links."""
        name = self.names[rank]
        links = [document.metadata["url"] for document in read_shard(self.shards[rank])]
        journal = Journal(self.work / f"{name}.journal")
        unfinished = [(position, url) for position, url in enumerate(links) if position not in journal]
        if unfinished:
            try:
                asyncio.run(self._fetch_all(unfinished, journal, self.work / f"{name}.extraction.log"))
            except* UserError as errors:
                raise errors.exceptions[0] from None
        with (
            ShardWriter(self.target, name, self.compression) as kept,
            ShardWriter(self.dropped, name, self.compression) as dropped,
        ):
            for position, url in enumerate(links):
                outcome = journal.read(position)
                document = Document(text=outcome.get("text", ""), id=url, metadata={"url": url})
                if "reason" in outcome:
                    dropped.write(dropped_line(document, outcome["reason"], outcome["detail"]))
                else:
                    kept.write(as_line(document))
                    yield document
        journal.close()

    async def _fetch_all(self, links: Sequence[tuple[int, str]], journal: Journal, log: Path) -> None:
        queues: defaultdict[str, deque[tuple[int, str]]] = defaultdict(deque)
        for position, url in links:
            queues[urlsplit(url).netloc].append((position, url))
        # Hosts take turns. The queue holds a host once for each simultaneous request to it.
        turns: asyncio.Queue[str] = asyncio.Queue()
        for _ in range(self.config.concurrent_per_host):
            for host in queues:
                turns.put_nowait(host)
        async with (
            Fetcher(self.config, self.concurrent) as fetcher,
            Extractor(self.config.extraction_seconds, log) as extractor,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(min(self.concurrent, len(links))):
                group.create_task(self._visit(queues, turns, journal, fetcher, extractor))

    async def _visit(
        self,
        queues: dict[str, deque[tuple[int, str]]],
        turns: asyncio.Queue[str],
        journal: Journal,
        fetcher: Fetcher,
        extractor: Extractor,
    ) -> None:
        while not turns.empty():
            host = turns.get_nowait()
            if not queues[host]:
                continue
            position, url = queues[host].popleft()
            if self._num_unanswered[host] < MAX_UNANSWERED_PAGES:
                outcome = await self._outcome(url, fetcher, extractor)
                is_unanswered = outcome.get("reason") in (TIME_OUT, CONNECTION)
                self._num_unanswered[host] = self._num_unanswered[host] + 1 if is_unanswered else 0
            else:
                detail = f"{MAX_UNANSWERED_PAGES} pages before it got no answer"
                outcome = {"reason": UNRESPONSIVE_HOST, "detail": detail}
            journal.add(position, outcome)
            turns.put_nowait(host)

    async def _outcome(self, url: str, fetcher: Fetcher, extractor: Extractor) -> dict[str, str]:
        try:
            return {"text": await extractor.text_of(await fetcher.fetch(url))}
        except PageError as error:
            return {"reason": error.reason, "detail": error.detail}
