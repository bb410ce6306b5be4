"""Numbers that a report shows, computed from what the run directory records."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from meshtrain.profiling.report.recorded import CHECKPOINT_SECONDS, Metrics, RecordedRun

STEP_PARTS = {
    "data": "data_seconds",
    "forward and backward": "forward_backward_seconds",
    "optimizer": "optimizer_seconds",
}
"""Part of a step -> its key in metrics.jsonl. The remainder is the `rest`."""


@dataclass(frozen=True)
class PartOfTime:
    """What a part of the run's time sums up to.

    Attributes:
        name: of the part.
        seconds: in all.
        number: of times.
        typical: the median, in seconds.
    """

    name: str
    seconds: float
    number: int
    typical: float


def numbers(rows: Iterable[Metrics], key: str) -> list[float]:
    """Return the finite values of a key."""
    return [row[key] for row in rows if isinstance(row.get(key), int | float) and math.isfinite(row[key])]


def settled_steps(run: RecordedRun) -> tuple[Metrics, ...]:
    """Return the steps without the first after each start, which compiles and allocates."""
    firsts = {start["step"] + 1 for start in run.starts} or {row["step"] for row in run.steps[:1]}
    settled = tuple(row for row in run.steps if row["step"] not in firsts)
    return settled or run.steps


def typical(run: RecordedRun, key: str) -> float | None:
    """Return the median of a value over the settled steps; None if there is none."""
    values = numbers(settled_steps(run), key)
    return median(values) if values else None


def mfu(run: RecordedRun) -> float | None:
    """Return the typical share of the peak rate that was used; None if the rate is unknown."""
    rate, peak = typical(run, "teraflops_per_second"), peak_tflops(run)
    return None if rate is None or peak is None else rate / peak


def peak_tflops(run: RecordedRun) -> float | None:
    """Return the most TFLOP/s of a device; None if it is unknown."""
    return (run.prediction.peak_tflops or None) if run.prediction is not None else None


def peak_memory(run: RecordedRun) -> float | None:
    """Return the most bytes that any process has used; None if unknown."""
    return max(numbers(run.steps, "memory_bytes"), default=None)


def rest_seconds(row: Metrics) -> float:
    """Return the part of a step that is neither data nor computation: metrics and agreement."""
    known = sum(row.get(key) or 0.0 for key in STEP_PARTS.values())
    return max(0.0, (row.get("seconds") or 0.0) - known)


def parts_of_time(run: RecordedRun) -> list[PartOfTime]:
    """Return how the time of the recorded steps, evaluations and saves is made up."""
    parts = {name: numbers(run.steps, key) for name, key in STEP_PARTS.items()}
    parts["rest of the step"] = [rest_seconds(row) for row in run.steps]
    parts["evaluation"] = numbers(run.evaluations, "evaluation_seconds")
    parts["saving"] = numbers(run.saves, CHECKPOINT_SECONDS)
    return [PartOfTime(name, sum(seconds), len(seconds), median(seconds)) for name, seconds in parts.items() if seconds]


def num_steps(run: RecordedRun) -> int | None:
    """Return the number of steps that the run is to do; None if run.toml does not say."""
    steps = run.run.get("steps")
    return steps if isinstance(steps, int) else None


def last_step(run: RecordedRun) -> int:
    """Return the number of steps that are done."""
    return max((row["step"] for row in run.steps), default=0)
