"""Metrics of a run: metrics.jsonl, TensorBoard, and the line or bar on the screen; rank 0 only."""

import json
import math
import os
import resource
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DataType
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from meshtrain.config.reading import shown_path
from meshtrain.console import TrainingProgress
from meshtrain.data.cache import write_atomically
from meshtrain.runtime.agreement import is_first_rank
from meshtrain.training.directory import metrics_lines
from meshtrain.training.epoch_averages import EpochAverages
from meshtrain.training.files import METRICS_NAME

TENSORBOARD_NAME = "tensorboard"
SHOWN = {"loss", "eval_loss"}
NO_TEXTS: Mapping[str, str] = {}


class MetricsWriter:
    """Writes each object of metrics to the files and the screen; a context manager.

    A file that cannot be written does not raise an error here, because the other ranks would not
    learn of it. `problem` reports it instead.

    Args:
        directory: the run directory.
        first_step: number of steps done before. What a stopped run wrote after its last checkpoint
            is dropped.
        progress: shows the metrics on the screen.
        tensorboard: whether to write events for TensorBoard.
    """

    def __init__(self, directory: Path, *, first_step: int, progress: TrainingProgress, tensorboard: bool) -> None:
        self.problem: str | None = None
        self._directory, self._first_step = directory, first_step
        self._progress = progress
        self._tensorboard = tensorboard
        self._files: list[_MetricsFile] = []
        self._epoch = EpochAverages()

    def __enter__(self) -> Self:
        if is_first_rank():
            with self._noting_problems():
                self._open_files()
        self._progress.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__(*exception)
        for file in self._files:
            # Every write was flushed at once, and a failure was noted then.
            with suppress(OSError):
                file.close()

    def write(self, step: int, metrics: Mapping[str, float], texts: Mapping[str, str] = NO_TEXTS) -> None:
        """Write one object: of a step, an evaluation, a checkpoint or an epoch.

        Args:
            step: optimizer steps done.
            metrics: name -> number.
            texts: name -> text, for metrics.jsonl only.
        """
        self._epoch.add(metrics)
        with self._noting_problems():
            for file in self._files:
                file.write(step, metrics, texts)
        if metrics.keys() & SHOWN:
            self._progress.update(step, metrics)

    def write_note(self, step: int, note: Mapping[str, object]) -> None:
        """Write one object that is not a row of numbers."""
        with self._noting_problems():
            for file in self._files:
                file.write_note(step, note)

    def write_epoch(self, step: int) -> None:
        """Write the averages over the epoch of the latest step, up to that step."""
        self.write(step, self._epoch.averages())

    def _open_files(self) -> None:
        path = self._directory / METRICS_NAME
        for metrics in _drop_lines_behind(path, self._first_step):
            self._epoch.add(metrics)
        self._files.append(_JsonLines(path))
        if self._tensorboard:
            self._files.append(_Events(self._directory / TENSORBOARD_NAME, first_step=self._first_step))

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = f"cannot write metrics into {shown_path(self._directory)}: {error.strerror}"


class _MetricsFile(Protocol):
    """A file to which metrics are appended; what was written before a kill can be read."""

    def write(self, step: int, metrics: Mapping[str, float], texts: Mapping[str, str]) -> None: ...

    def write_note(self, step: int, note: Mapping[str, object]) -> None: ...

    def close(self) -> None: ...


class _JsonLines:
    """Metrics as one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float], texts: Mapping[str, str]) -> None:
        # JSON has no infinity: the loss of a step that overflowed becomes null.
        self._add({"step": step, **{name: v if math.isfinite(v) else None for name, v in metrics.items()}, **texts})

    def write_note(self, step: int, note: Mapping[str, object]) -> None:
        self._add({"step": step, **note})

    def close(self) -> None:
        self._file.close()

    def _add(self, values: Mapping[str, object]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


class _Events:
    """TensorBoard's event file.

    torch's SummaryWriter is not used. Its thread writes minutes later, and prints its own
    traceback when the disk is full.
    """

    def __init__(self, directory: Path, *, first_step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names.
        name = f"events.out.tfevents.{time.time_ns():020}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("wb")
        self._records = RecordWriter(self._file)
        self._add(Event(file_version="brain.Event:2"))
        # Readers then drop what a stopped run wrote after its last checkpoint.
        self._add(Event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, metrics: Mapping[str, float], texts: Mapping[str, str]) -> None:
        values = [Summary.Value(tag=grouped(name), simple_value=value) for name, value in metrics.items()]
        self._add(Event(step=step, summary=Summary(value=values)))

    def write_note(self, step: int, note: Mapping[str, Any]) -> None:
        """Show the texts of `[generate]`. TensorBoard has no place for other notes."""
        texts = note.get("generated", ())
        if texts:
            values = [_text_value(f"generated/{number}", found["text"]) for number, found in enumerate(texts, start=1)]
            self._add(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()


def _text_value(tag: str, text: str) -> Any:
    # TensorBoard reads Markdown. An indented block is shown as it is.
    shown = "".join(f"    {line}\n" for line in text.splitlines())
    tensor = TensorProto(dtype=DataType.DT_STRING, string_val=[shown.encode()], tensor_shape=TensorShapeProto())
    return Summary.Value(tag=tag, tensor=tensor, metadata=create_summary_metadata(tag, ""))


def memory_bytes(device: torch.device) -> int:
    """Return the most bytes this process has used so far: of its GPU, otherwise of its machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _drop_lines_behind(path: Path, step: int) -> list[dict[str, float | None]]:
    """Drop the lines of later steps from metrics.jsonl, and return the others as objects."""
    kept = [(line, metrics) for line, metrics in metrics_lines(path) if metrics["step"] <= step]
    whole = "".join(line for line, _ in kept)
    if path.exists() and path.stat().st_size != len(whole.encode()):
        write_atomically(path, whole)
    return [metrics for _, metrics in kept]


def grouped(name: str) -> str:
    """Return group/name: trackers show each group as a section that can be folded."""
    if name.startswith("epoch_"):
        return f"epoch/{name.removeprefix('epoch_')}"
    if name.endswith("seconds"):
        return f"timing/{name}"
    return f"evaluation/{name}" if name.startswith("eval_") else f"train/{name}"
