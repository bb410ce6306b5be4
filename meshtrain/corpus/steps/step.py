"""A step and its directory, which holds its settings, its documents and their counts.

It is called NN-step, with the number of the step and its name. Beside the shards of documents (for
`split`: in train/, validation/ and test/) it has:

dropped/     shards of dropped documents, with the reasons
step.json    the settings that the result depends on, and the identity of the input
counts.json  documents in, out, and dropped by reason; exists when the step is complete
logs/        datatrove's logs, for each pass
work/        files between two passes; removed when the step is complete
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from meshtrain.config.corpus import CorpusConfig
from meshtrain.corpus.steps.blocks import Documents, ShardPass
from meshtrain.corpus.steps.shards import list_shards, read_lines
from meshtrain.corpus.steps.shuffle import PARTS
from meshtrain.data.cache import write_atomically
from meshtrain.data.text.sources import SourceFile
from meshtrain.errors import DataError

MAX_COUNTING_TASKS = 64
READ = "read"
"""The step that reads the sources. The corpus file has no table for it."""


@dataclass(frozen=True)
class Step:
    """A step of the chain."""

    name: str
    directory: "StepDirectory"
    settings: dict[str, Any]
    """The settings that the result depends on, and the identity of the input."""
    passes: Callable[[], list[ShardPass]]
    """Builds the passes. It is called when the input of the step is complete."""
    files: Sequence[SourceFile] = ()
    """The source files, for the first step."""

    def check_unchanged(self) -> None:
        """Check that the source files have not changed while they were read.

        Raises:
            DataError: naming the first file that changed.
        """
        for file in self.files:
            if not file.is_unchanged():
                raise DataError(
                    f"{file.path} changed while it was read",
                    f"when nothing writes to it any more, run again with --redo {self.name}",
                )


@dataclass(frozen=True)
class Counts:
    """What happened to the documents in a step."""

    entered: int
    kept: int
    dropped: dict[str, int]
    """Dropped documents by reason, the most frequent reason first."""
    parts: dict[str, int]
    """For `split`: documents of each part."""
    num_bytes: int
    """Size of the kept documents, uncompressed."""
    seconds: float
    """Time that the passes took, over all starts."""

    @property
    def documents_per_second(self) -> float:
        """Documents that entered the step per second, with all workers together."""
        return self.entered / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class StepDirectory:
    """The directory of a step."""

    path: Path

    @property
    def dropped(self) -> Path:
        """Directory of the shards of dropped documents."""
        return self.path / "dropped"

    @property
    def work(self) -> Path:
        """Directory of the files between two passes. It is removed when the step is complete."""
        return self.path / "work"

    def logs(self, name: str) -> Path:
        """Return the directory in which datatrove stores the progress and the logs of a pass."""
        return self.path / "logs" / name

    def shards(self) -> list[Path]:
        """Return the shards of documents."""
        return list_shards(self.path) + [shard for part in PARTS for shard in list_shards(self.path / part)]

    def counts(self) -> Counts | None:
        """Return what happened to the documents, or None if the step is not complete."""
        path = self.path / "counts.json"
        if not path.exists():
            return None
        stored = json.loads(path.read_text())
        return Counts(entered=stored.pop("in"), kept=stored.pop("out"), **stored)

    def write_counts(self, counts: Counts) -> None:
        """Write the counts, which marks the step as complete."""
        shutil.rmtree(self.work, ignore_errors=True)
        documents = {"in": counts.entered, "out": counts.kept, "dropped": counts.dropped, "parts": counts.parts}
        more = {"num_bytes": counts.num_bytes, "seconds": round(counts.seconds, 3)}
        write_atomically(self.path / "counts.json", json.dumps(documents | more, indent=2) + "\n")

    def begin(self, step: str, settings: dict[str, Any]) -> None:
        """Create the directory, or check that it was made with the same settings.

        Raises:
            DataError: if the directory was made with other settings or from other input.
        """
        path = self.path / "step.json"
        if not path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(settings, indent=2) + "\n")
            return
        before = json.loads(path.read_text())
        # JSON turns tuples into lists, so the settings are compared in the form that was written.
        now = json.loads(json.dumps(settings))
        if changed := [key for key in (*before, *(now.keys() - before)) if before.get(key) != now.get(key)]:
            raise DataError(
                f"{step}: {self.path} was made with other settings: {_describe_changes(before, now, changed)}",
                f"add --redo {step} to remove it and the steps after it, or set directory to a new location",
            )

    def add_seconds(self, seconds: float) -> float:
        """Add to the seconds that this and earlier starts took, and return the sum."""
        path = self.path / "logs" / "seconds"
        total = seconds + (float(path.read_text()) if path.exists() else 0.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{total}")
        return total


def _describe_changes(before: dict[str, Any], now: dict[str, Any], changed: Sequence[str]) -> str:
    if "input" in changed:
        return "its input has changed"
    return ", ".join(f"{key} was {_shorten(before.get(key))} and is {_shorten(now.get(key))}" for key in changed)


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class CountShards(PipelineStep):
    """Counts the documents that are on disk: every line of every shard.

    Args:
        shards: pairs of a label and a shard. The label is "dropped", the name of a part, or empty.
    """

    name = "lines"
    type = "counter"

    def __init__(self, shards: Sequence[tuple[str, Path]]) -> None:
        super().__init__()
        self.shards = tuple(shards)

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> None:
        """Count the shards of this task."""
        for label, path in self.shards[rank::world_size]:
            for line in read_lines(path):
                if label == "dropped":
                    self.stat_update(f"dropped: {json.loads(line)['reason']}")
                else:
                    self.stat_update(f"kept: {label}")
                    self.stat_update("bytes", value=len(line))


def step_directories(config: CorpusConfig) -> list[tuple[str, StepDirectory]]:
    """Return the names and the directories of all steps of a corpus file, in order."""
    names = config.steps if config.urls is not None else (READ, *config.steps)
    return [
        (name, StepDirectory(Path(config.directory) / f"{number:02}-{name}")) for number, name in enumerate(names, 1)
    ]


def counting_pass(directory: StepDirectory) -> ShardPass:
    """Return the pass that counts the documents that a step has written."""
    shards = [("" if path.parent == directory.path else path.parent.name, path) for path in directory.shards()]
    shards += [("dropped", path) for path in list_shards(directory.dropped)]
    return ShardPass("count", [CountShards(shards)], min(MAX_COUNTING_TASKS, len(shards)) or 1)


def read_dropped(directory: StepDirectory) -> Iterator[dict[str, Any]]:
    """Yield the dropped documents of a step."""
    for shard in list_shards(directory.dropped):
        for line in read_lines(shard):
            yield json.loads(line)
