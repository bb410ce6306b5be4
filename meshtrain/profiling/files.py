"""Two files of a run directory: what was predicted for a step, and what was measured.

RUN/prediction.json       the prediction, written before the first step
RUN/profile/summary.json  the profile of a few steps
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from meshtrain.config.reading import shown_path
from meshtrain.errors import UserError, reason_of
from meshtrain.pictures.timeline import Kind, Timeline

PREDICTION_NAME = "prediction.json"
PROFILE_NAME = "profile"
SUMMARY_NAME = "summary.json"
"""Name of the summary inside `RUN/profile`."""

Span = tuple[Kind, float, float, int | None, int | None]
_SPANS: TypeAdapter[list[Span]] = TypeAdapter(list[Span])


def _as_timeline(values: Any) -> Timeline:
    """Return the timeline of what `Timeline.to_json` has written.

    Raises:
        ValueError: if it has not written this.
    """
    if isinstance(values, Timeline):
        return values
    try:
        for lane in values:
            _SPANS.validate_python(lane["spans"])
        return Timeline.from_json(values)
    except (TypeError, KeyError, ValidationError) as error:
        raise ValueError("not the lanes of a timeline") from error


TimelineField = Annotated[Timeline, BeforeValidator(_as_timeline)]


@dataclass(frozen=True)
class AxisTraffic:
    """Messages of a process over one axis of the mesh, in a step.

    Attributes:
        bytes: that they carry.
        seconds: that they take.
        exposed_seconds: the part of these during which the process computes nothing.
    """

    bytes: int
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Prediction:
    """What was predicted for a step of a run.

    Attributes:
        machine: name of its description.
        measured: whether its rates were measured.
        is_cpu: whether it is a CPU.
        world_size: number of processes.
        limit_bytes: memory of a device.
        peak_bytes: the most bytes that the first process of each pp rank needs.
        fits: whether every process fits the memory.
        verdict: a line that says so.
        step_seconds: time of a step; None if the speed of the machine is unknown.
        tokens_per_second: of each process; None if it is unknown.
        mfu: model FLOPs utilization: the share of the peak rate that is used; None if unknown.
        peak_tflops: the most TFLOP/s of a device; None if unknown.
        bubble: share of the step in which the processes of a pipeline wait for each other; None if
            unknown.
        axes: traffic by axis of the mesh.
        timeline: of a step; without lanes if it is unknown.
    """

    machine: str
    measured: bool
    is_cpu: bool
    world_size: int
    limit_bytes: int
    peak_bytes: tuple[int, ...]
    fits: bool
    verdict: str
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    peak_tflops: float | None
    bubble: float | None
    axes: dict[str, AxisTraffic]
    timeline: TimelineField

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as lists and dictionaries that `json` writes."""
        # `asdict` would take every span apart.
        rest = asdict(replace(self, timeline=Timeline(())))
        return {**rest, "peak_bytes": list(self.peak_bytes), "timeline": self.timeline.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the prediction that `to_json` has described.

        Raises:
            ValidationError: if a value is missing or of another type.
        """
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True)
class ProfiledMessages:
    """Messages of one operator over one axis, of a process in a step.

    Attributes:
        axis: of the mesh.
        operator: such as "all_reduce".
        number: of messages.
        bytes: that they carry together.
        seconds: that they take together.
    """

    axis: str
    operator: str
    number: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class ProfiledRank:
    """What was measured on one process.

    Attributes:
        rank: of the process.
        peak_bytes: the most bytes of its device that were in use.
        messages: averages of a step.
    """

    rank: int
    peak_bytes: int
    messages: tuple[ProfiledMessages, ...]


@dataclass(frozen=True)
class ProfileSummary:
    """What the profile of a run measured.

    Attributes:
        steps: the first and the last step of the profile, counted from 1.
        step_seconds: time of each of these steps but the last one, which is traced.
        ranks: the processes that were profiled.
        timeline: of one step.
    """

    steps: tuple[int, int]
    step_seconds: tuple[float, ...]
    ranks: tuple[ProfiledRank, ...]
    timeline: TimelineField

    def to_json(self) -> dict[str, Any]:
        """Return the summary as lists and dictionaries that `json` writes."""
        return {
            "steps": list(self.steps),
            "step_seconds": list(self.step_seconds),
            "ranks": [{**asdict(rank), "messages": [asdict(one) for one in rank.messages]} for rank in self.ranks],
            "timeline": self.timeline.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the summary that `to_json` has described.

        Raises:
            ValidationError: if a value is missing or of another type.
        """
        return TypeAdapter(cls).validate_python(values)


F = TypeVar("F", Prediction, ProfileSummary)


def prediction_path(run_directory: Path) -> Path:
    """Return the path of the prediction of a run."""
    return run_directory / PREDICTION_NAME


def summary_path(run_directory: Path) -> Path:
    """Return the path of the summary of a run's profile."""
    return run_directory / PROFILE_NAME / SUMMARY_NAME


def read_prediction(run_directory: Path) -> Prediction | None:
    """Return the prediction of a run; None if there is none.

    Raises:
        UserError: if the file is damaged.
    """
    return _read(prediction_path(run_directory), Prediction)


def read_summary(run_directory: Path) -> ProfileSummary | None:
    """Return the summary of the profile of a run; None if there is none.

    Raises:
        UserError: if the file is damaged.
    """
    return _read(summary_path(run_directory), ProfileSummary)


def _read(path: Path, kind: type[F]) -> F | None:
    try:
        return kind.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise _damaged(path, _first_problem(error)) from error
    except json.JSONDecodeError as error:
        raise _damaged(path, f"line {error.lineno}: not JSON") from error
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, f"cannot be read: {reason_of(error)}") from error


def _damaged(path: Path, found: str) -> UserError:
    return UserError(f"{shown_path(path)}: {found}", "remove the file, or write it again")


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    reason = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
    return f"{where}: {reason}" if where else reason
