"""What a run writes down: metrics.jsonl, TensorBoard, and the line or bar on the screen. On rank 0 only."""

import json
import resource
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from meshtrain.console import TrainingProgress

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"
AVERAGED = (
    "loss",
    "tokens_per_second",
    "memory_bytes",
    "seconds",
    "data_seconds",
    "forward_backward_seconds",
    "optimizer_seconds",
)
SHOWN = {"loss", "eval_loss"}


class MetricsWriter:
    """Writes every object of metrics to all places; a context manager.

    Args:
        directory: of the run.
        first_step: steps done before; what a stopped run wrote behind its last checkpoint is dropped.
        progress: where the person looks.
        tensorboard: whether to write events.
    """

    def __init__(self, directory: Path, *, first_step: int, progress: TrainingProgress, tensorboard: bool) -> None:
        self._path = directory / METRICS_NAME
        self._tensorboard_directory = directory / TENSORBOARD_NAME if tensorboard else None
        self._first_step = first_step
        self._progress = progress
        self._file: IO[str] | None = None
        self._events: Any = None

    def __enter__(self) -> "MetricsWriter":
        _drop_lines_behind(self._path, self._first_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._progress.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__(*exception)
        assert self._file is not None
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one object: of a step, an evaluation, a checkpoint or an epoch.

        Args:
            step: optimizer steps done.
            metrics: name -> number.
        """
        assert self._file is not None, "not entered"
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if metrics.keys() & SHOWN:
            self._progress.update(step, metrics)
        if self._tensorboard_directory is not None:
            events = self._open_events(self._tensorboard_directory)
            for name, value in metrics.items():
                events.add_scalar(f"{_tensorboard_group(name)}/{name}", value, step)

    def _open_events(self, directory: Path) -> Any:
        if self._events is None:
            # Not at the top: it takes half a second, which a run has after its first step and not before.
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self._events = SummaryWriter(str(directory), purge_step=self._first_step + 1)
        return self._events


class EpochAverages:
    """Averages of the steps of an epoch that this process has seen."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._num_steps = 0

    def add(self, metrics: Mapping[str, float]) -> None:
        """Count a step in."""
        self._num_steps += 1
        for name in AVERAGED:
            self._sums[name] += metrics[name]

    def take(self, epoch: int) -> dict[str, float]:
        """Return the averages as metrics of the epoch (from 1), and begin the next."""
        averages = {f"epoch_{name}": total / self._num_steps for name, total in self._sums.items()}
        summary = {"epoch": epoch, "epoch_steps": self._num_steps, **averages}
        self._sums.clear()
        self._num_steps = 0
        return summary


def memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has used so far: of its GPU, else of its machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _drop_lines_behind(path: Path, step: int) -> None:
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # The last line of a killed run may be cut off.
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if kept != lines:
        draft = path.with_suffix(".tmp")
        draft.write_text("".join(kept), encoding="utf-8")
        draft.replace(path)


def _tensorboard_group(name: str) -> str:
    if name.startswith("epoch"):
        return "epoch"
    if name.startswith("eval"):
        return "evaluation"
    return "timing" if name.endswith("seconds") else "train"
