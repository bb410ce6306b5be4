"""What the files of a run directory record."""

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshtrain.config.reading import shown_path
from meshtrain.errors import Problem, UserError, reason_of
from meshtrain.profiling.files import Prediction, ProfileSummary, read_prediction, read_summary
from meshtrain.runtime.failure import FAILURE_NAME, Failure, failure_from_json
from meshtrain.training.files import METRICS_NAME, PLAN_NAME, RUN_NAME, SAVED_KEY

Metrics = dict[str, Any]
"""An object of metrics.jsonl."""
CHECKPOINT_SECONDS, BACKGROUND_SECONDS = "checkpoint_seconds", "checkpoint_background_seconds"
OF_SOURCE, OF_AVERAGE = "eval_loss/", "eval_loss_ema"


@dataclass(frozen=True)
class RecordedRun:
    """What a run directory records.

    Attributes:
        directory: the run directory.
        metrics: the objects of metrics.jsonl, in order; at least one.
        run_text: of run.toml; empty if there is none.
        plan_text: of plan.toml; empty if there is none.
        failure: why the run ended, if it failed.
        prediction: what was predicted for a step, if anything.
        summary: of the profile, if there is one.
    """

    directory: Path
    metrics: tuple[Metrics, ...]
    run_text: str
    plan_text: str
    failure: Failure | None
    prediction: Prediction | None
    summary: ProfileSummary | None

    @cached_property
    def steps(self) -> tuple[Metrics, ...]:
        """Return the steps. A bad step that was skipped is one of them."""
        return self._with("loss")

    @cached_property
    def evaluations(self) -> tuple[Metrics, ...]:
        """Return the evaluations."""
        return self._with("eval_loss")

    @cached_property
    def further_evaluations(self) -> dict[str, str]:
        """Return metric -> label, for the losses of sources, and that of the average of weights."""
        names = sorted({name for metrics in self.evaluations for name in metrics})
        sources = {name: name.removeprefix(OF_SOURCE) for name in names if name.startswith(OF_SOURCE)}
        return sources | ({OF_AVERAGE: "average of weights"} if OF_AVERAGE in names else {})

    @cached_property
    def starts(self) -> tuple[Metrics, ...]:
        """Return the starts of the run; a run without self-checks records none."""
        return self._with("parameters_checksum")

    @cached_property
    def bad_steps(self) -> tuple[Metrics, ...]:
        """Return the bad steps that were skipped or left out."""
        return self._with("bad_step")

    @cached_property
    def saves(self) -> tuple[Metrics, ...]:
        """Return the checkpoints: seconds of the save, and the location once it is complete."""
        saves: dict[int, Metrics] = {}
        for metrics in self.metrics:
            if CHECKPOINT_SECONDS in metrics or BACKGROUND_SECONDS in metrics or SAVED_KEY in metrics:
                saves.setdefault(metrics["step"], {}).update(metrics)
        return tuple(saves[step] for step in sorted(saves))

    @cached_property
    def run(self) -> dict[str, Any]:
        """Return the settings in run.toml."""
        return tomllib.loads(self.run_text)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Return the settings in plan.toml."""
        return tomllib.loads(self.plan_text)

    def _with(self, key: str) -> tuple[Metrics, ...]:
        return tuple(metrics for metrics in self.metrics if key in metrics)


def read_run_directory(directory: Path) -> RecordedRun:
    """Return what a run directory records.

    Raises:
        UserError: if it is no run directory, or one of its files is damaged.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise UserError(f"{shown_path(directory)} {what}", "pass the run_directory of a run")
    failure = _failure(directory / FAILURE_NAME)
    return RecordedRun(
        directory=directory,
        metrics=_metrics(directory / METRICS_NAME, failure),
        run_text=_toml(directory / RUN_NAME),
        plan_text=_toml(directory / PLAN_NAME),
        failure=failure,
        prediction=read_prediction(directory),
        summary=read_summary(directory),
    )


def _metrics(path: Path, failure: Failure | None) -> tuple[Metrics, ...]:
    if not path.exists():
        where = shown_path(path.parent)
        if failure is not None:
            raise UserError(
                f"{where} has no {METRICS_NAME}; the run failed before its first step: {failure.sentence()}"
            )
        raise UserError(f"{where} has no {METRICS_NAME}", "pass the run_directory of a run that has done a step")
    metrics = tuple(_objects(path))
    if not metrics:
        raise UserError(f"{shown_path(path)} is empty", "wait until the run has done a step")
    return metrics


def _objects(path: Path) -> Iterator[Metrics]:
    """Yield the objects of metrics.jsonl.

    The last line may be incomplete, because the run may be writing it, or may have been killed.
    """
    lines = _text(path).split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            metrics = json.loads(line)
        except ValueError as error:
            raise _damaged_line(path, number, "not JSON") from error
        if not isinstance(metrics, dict) or not isinstance(metrics.get("step"), int):
            raise _damaged_line(path, number, "not an object with a `step`")
        if problem := _wrong_value(metrics):
            raise _damaged_line(path, number, problem)
        yield metrics


TEXTS = {SAVED_KEY, "parameters_checksum", "fault", "samples", "answer", "generated"}
"""Keys whose values are not numbers."""


def _wrong_value(metrics: Metrics) -> str:
    for name, value in metrics.items():
        if name not in TEXTS and value is not None and not isinstance(value, int | float):
            return f"{name} is {value!r}, not a number"
    return ""


def _damaged_line(path: Path, number: int, found: str) -> UserError:
    return UserError(Problem(found, "remove the line", f"{shown_path(path)}, line {number}"))


def _text(path: Path) -> str:
    return _read(path, lambda path: path.read_text(encoding="utf-8", errors="replace"))


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    """Return what a function reads from a file.

    Raises:
        UserError: if it cannot.
    """
    try:
        return read(path)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(
            f"{shown_path(path)} cannot be read: {reason_of(error)}", "correct it, or move it away"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{shown_path(path)} is damaged", "move it away") from error


def _toml(path: Path) -> str:
    """Return the text of a TOML file that can be parsed; an empty text if there is none."""

    def read(path: Path) -> str:
        text = path.read_text(encoding="utf-8")
        tomllib.loads(text)
        return text

    return _read(path, read) if path.exists() else ""


def _failure(path: Path) -> Failure | None:
    return _read(path, lambda path: failure_from_json(path.read_bytes())) if path.exists() else None
