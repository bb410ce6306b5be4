"""Steps: each has a directory of its own, which says what it was made of, and what happened to every document.

NN-step/             shards of documents (for `split`: below train/, validation/ and test/)
NN-step/dropped/     shards of what was dropped, with the reason
NN-step/step.json    what decides the result: the step's words, and what it read
NN-step/counts.json  there when the step is complete: in, out, dropped by reason
NN-step/logs/        of datatrove, for each stage
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

MOST_COUNTERS = 64
READ = "read"
"""The step that reads the sources; it has no table of its own."""


@dataclass(frozen=True)
class Step:
    """A step of the chain."""

    name: str
    place: "StepDirectory"
    words: dict[str, Any]
    """All of the configuration that decides the result."""
    stages: Callable[[], list[ShardPass]]
    """Called when what the step reads is complete."""
    files: Sequence[SourceFile] = ()
    """What the first step reads."""

    def check_unchanged(self) -> None:
        """Check that nobody wrote to what was read.

        Raises:
            DataError: naming the first file that changed.
        """
        for file in self.files:
            if not file.is_unchanged():
                raise DataError(
                    f"{file.path} changed while it was read; add --redo {self.name} when nothing writes to it any more"
                )


@dataclass(frozen=True)
class Counts:
    """What happened to the documents in a step."""

    entered: int
    kept: int
    dropped: dict[str, int]
    """By reason, the most frequent first."""
    parts: dict[str, int]
    """For `split`: documents per part."""
    num_bytes: int
    """Of the kept documents, uncompressed."""
    seconds: float
    """Of work, over all starts."""

    @property
    def documents_per_second(self) -> float:
        """Documents that entered per second of work, over all workers."""
        return self.entered / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class StepDirectory:
    """The directory of a step."""

    directory: Path

    @property
    def dropped(self) -> Path:
        """Where dropped documents are."""
        return self.directory / "dropped"

    @property
    def work(self) -> Path:
        """For what lies between two stages; removed when the step is complete."""
        return self.directory / "work"

    def logs(self, stage: str) -> Path:
        """Where datatrove keeps what it knows of a stage."""
        return self.directory / "logs" / stage

    def shards(self) -> list[Path]:
        """Return the shards of documents."""
        return list_shards(self.directory) + [shard for part in PARTS for shard in list_shards(self.directory / part)]

    def counts(self) -> Counts | None:
        """Return what happened to the documents; None: the step is not complete."""
        path = self.directory / "counts.json"
        if not path.exists():
            return None
        said = json.loads(path.read_text())
        return Counts(entered=said.pop("in"), kept=said.pop("out"), **said)

    def write_counts(self, counts: Counts) -> None:
        """Say that the step is complete."""
        shutil.rmtree(self.work, ignore_errors=True)
        said = {"in": counts.entered, "out": counts.kept, "dropped": counts.dropped, "parts": counts.parts}
        more = {"num_bytes": counts.num_bytes, "seconds": round(counts.seconds, 3)}
        write_atomically(self.directory / "counts.json", json.dumps(said | more, indent=2) + "\n")

    def begin(self, step: str, words: dict[str, Any]) -> None:
        """Make the directory, or go on in it.

        Raises:
            DataError: if what lies there was made of something else.
        """
        path = self.directory / "step.json"
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(words, indent=2) + "\n")
            return
        before = json.loads(path.read_text())
        # As it was written: JSON knows no tuples.
        now = json.loads(json.dumps(words))
        if changed := [key for key in (*before, *(now.keys() - before)) if before.get(key) != now.get(key)]:
            raise DataError(
                f"{step}: {self.directory} was made with other settings: {_differences(before, now, changed)}; add "
                f"--redo {step} to remove it and what follows it, or set directory to a new place"
            )

    def add_seconds(self, seconds: float) -> float:
        """Add to the seconds of work that this and earlier starts took, and return them all."""
        path = self.directory / "logs" / "seconds"
        total = seconds + (float(path.read_text()) if path.exists() else 0.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{total}")
        return total


def _differences(before: dict[str, Any], now: dict[str, Any], changed: Sequence[str]) -> str:
    if "input" in changed:
        return "what it reads has changed"
    return ", ".join(f"{key} was {_shown(before.get(key))} and is {_shown(now.get(key))}" for key in changed)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class CountShards(PipelineStep):
    """Counts what is on disk: every line of every shard, whoever wrote it."""

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


def counting_pass(place: StepDirectory) -> ShardPass:
    """Return the stage that counts what a step has written."""
    directory = place.directory
    shards = [("" if path.parent == directory else path.parent.name, path) for path in place.shards()]
    shards += [("dropped", path) for path in list_shards(place.dropped)]
    return ShardPass("count", [CountShards(shards)], min(MOST_COUNTERS, len(shards)) or 1)


def read_dropped(place: StepDirectory) -> Iterator[dict[str, Any]]:
    """Yield the dropped documents of a step."""
    for shard in list_shards(place.dropped):
        for line in read_lines(shard):
            yield json.loads(line)
