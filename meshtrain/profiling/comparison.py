"""What was predicted for a run, beside what it did."""

from dataclasses import dataclass
from statistics import median

from meshtrain.planning.names import gib
from meshtrain.profiling.files import Prediction, ProfileSummary
from meshtrain.training.hooks import Hook, Metrics, RunState

WARM_UP_STEPS = 2
"""Number of steps after a start whose times do not count, because they build and compile."""
NEAR = 0.1
"""A prediction that deviates by more than this fraction is called wrong."""


@dataclass(frozen=True)
class Measurement:
    """What a run did.

    Attributes:
        step_seconds: median time of a step; None if too few steps were done.
        peak_bytes: the most bytes of tensors on any process; None if nothing measured them.
    """

    step_seconds: float | None
    peak_bytes: int | None


class MeasuredHook(Hook):
    """Keeps the times of the steps and the peak of the memory, for a comparison at the end."""

    @property
    def num_measured_steps(self) -> int:
        """Return how many steps were measured so far."""
        return len(self._seconds)

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._left_of_warm_up = WARM_UP_STEPS
        self._peak_bytes: int | None = None

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Keep the time of the step, and the memory of GPUs."""
        if self._left_of_warm_up > 0:
            self._left_of_warm_up -= 1
        else:
            self._seconds.append(metrics["seconds"])
        # Elsewhere the metric is the memory of the process, with Python and its libraries.
        if state.model.mesh.device_type == "cuda":
            self._peak_bytes = max(self._peak_bytes or 0, int(metrics["memory_bytes"]))

    def measurement(self, profile: ProfileSummary | None = None) -> Measurement:
        """Return what was measured so far.

        Args:
            profile: of the run, if there is one. On a CPU only a profile measures the memory of
                tensors.
        """
        peaks = [rank.peak_bytes for rank in profile.ranks] if profile is not None else []
        if self._peak_bytes is not None:
            peaks.append(self._peak_bytes)
        return Measurement(median(self._seconds) if self._seconds else None, max(peaks, default=None))


def prediction_lines(prediction: Prediction) -> list[str]:
    """Return a line for what is predicted, and another one if that does not fit the machine."""
    parts = [f"peak {gib(max(prediction.peak_bytes))} of {gib(prediction.limit_bytes)} GiB"]
    if prediction.step_seconds is not None:
        parts.append(f"a step {_shown(prediction.step_seconds)} s")
    if prediction.tokens_per_second is not None:
        parts.append(f"{prediction.tokens_per_second:,.0f} tokens per second and process")
    origin = "" if prediction.measured else " (constants assumed, not measured)"
    line = f"Predicted for {prediction.machine}: {', '.join(parts)}{origin}"
    return [line] if prediction.fits else [line, f"{prediction.verdict} Training starts anyway."]


def comparison_lines(*, step_seconds: float | None, peak_bytes: int, measured: Measurement) -> list[str]:
    """Return a line for the time of a step if one was predicted, and one for the peak of memory.

    Args:
        step_seconds: as predicted.
        peak_bytes: as predicted, of the fullest process.
        measured: in the run.
    """
    memory = _compared_memory(peak_bytes, measured)
    return [memory] if step_seconds is None else [_compared_step(step_seconds, measured), memory]


def _compared_step(step_seconds: float, measured: Measurement) -> str:
    step = f"Step: predicted {_shown(step_seconds)} s"
    if measured.step_seconds is None:
        return f"{step}, not measured: the run had no step after the {WARM_UP_STEPS} that warm up"
    return f"{step}, measured {_shown(measured.step_seconds)} s{_deviation(step_seconds, measured.step_seconds)}"


def _compared_memory(peak_bytes: int, measured: Measurement) -> str:
    memory = f"Peak memory: predicted {gib(peak_bytes)} GiB"
    if measured.peak_bytes is None:
        return (
            f"{memory}, not measured: on a CPU the memory of the process is not that of its tensors, and only "
            "profile.steps measures that"
        )
    return f"{memory}, measured {gib(measured.peak_bytes)} GiB{_deviation(peak_bytes, measured.peak_bytes)}"


def _shown(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:,.0f}"


def _deviation(predicted: float, measured: float) -> str:
    change = measured / predicted - 1
    verdict = "" if abs(change) <= NEAR else f"; the prediction is off by more than {NEAR:.0%}"
    return f" ({change:+.1%}){verdict}"
