"""The step `read`: source files become shards.

datatrove's readers only log a broken record and continue. Here a broken record ends the step, or it
is dropped and counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from os.path import commonpath
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from meshtrain.config.corpus import CorpusConfig
from meshtrain.console import BYTES_PER_MB
from meshtrain.corpus.steps.blocks import Documents, ShardPass, dropped_line
from meshtrain.corpus.steps.records import BadCorpusRecord, read_records
from meshtrain.corpus.steps.shards import RollingWriter, ShardWriter, as_line
from meshtrain.data.text.sources import SourceFile
from meshtrain.errors import DataError

EMPTY = "empty"


def reading_passes(files: Sequence[SourceFile], target: Path, dropped: Path, config: CorpusConfig) -> list[ShardPass]:
    """Return the pass that turns source files into shards.

    Args:
        files: the sources, in order.
        target: the directory for the documents.
        dropped: the directory for broken records and empty documents.
        config: how files are read and shards are written.
    """
    # A group is smaller than a shard, so that a group of small files does not fill one shard and
    # begin another.
    groups = group_files(files, 0.75 * config.shard_megabytes * BYTES_PER_MB)
    return [ShardPass("read", [ReadSources(groups, target, dropped, config)], len(groups))]


def group_files(files: Sequence[SourceFile], group_bytes: float) -> list[list[SourceFile]]:
    """Split files into consecutive groups of similar size, one for each task.

    The groups do not depend on the number of workers.
    """
    groups: list[list[SourceFile]] = [[]]
    size = 0
    for file in files:
        if size >= group_bytes:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.num_bytes
    return groups


def relative_names(files: Iterable[SourceFile]) -> dict[str, str]:
    """Return the path of every file relative to the directory that contains all files."""
    paths = [file.path for file in files]
    root = commonpath([path.parent for path in paths])
    return {str(path): path.relative_to(root).as_posix() for path in paths}


class ReadSources(PipelineStep):
    """Reads one group of source files per task, and writes their documents into shards."""

    name = "sources"
    type = "reader"

    def __init__(
        self, groups: Sequence[Sequence[SourceFile]], target: Path, dropped: Path, config: CorpusConfig
    ) -> None:
        super().__init__()
        self.groups = groups
        self.names = relative_names(file for group in groups for file in group)
        self.target = target
        self.dropped = dropped
        self.config = config

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of the group of this task.

        Raises:
            DataError: if a record is broken and the settings do not skip such records.
        """
        config, name = self.config, f"{rank:05}"
        num_records = 0
        with (
            RollingWriter(self.target, name, config.compression, config.shard_megabytes * BYTES_PER_MB) as kept,
            ShardWriter(self.dropped, name, config.compression) as dropped,
        ):
            for file in self.groups[rank]:
                for record in read_records(file, self.names[str(file.path)], config.text_key):
                    num_records += 1
                    if isinstance(record, BadCorpusRecord):
                        self._check_skipped(record, file)
                        bad = Document(text=record.text, id=record.where)
                        dropped.write(dropped_line(bad, record.reason, record.detail))
                    elif not record.text.strip():
                        dropped.write(dropped_line(record, EMPTY))
                    else:
                        kept.write(as_line(record))
                        yield record
        self.stat_update("in", value=num_records)

    def _check_skipped(self, record: BadCorpusRecord, file: SourceFile) -> None:
        # A few files of Python's library have other encodings, and the user cannot fix them.
        if self.config.on_bad_record == "fail" and file.kind != "python":
            raise DataError(
                f"{record.where}: {record.reason}: {record.detail}",
                'fix it, or drop such records with on_bad_record = "skip"',
            )
