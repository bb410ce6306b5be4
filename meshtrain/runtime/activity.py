"""Where a process is in its work: a few words that the training writes in passing, and that other threads read."""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field

STEPS_REMEMBERED = 20
STEPS_TO_JUDGE_BY = 3


@dataclass(frozen=True)
class HangLimits:
    """How long the parts of a run may take before somebody is called stuck.

    Attributes:
        first_step_seconds: start-up, the first steps, an evaluation, a checkpoint.
        minimum_seconds: any other step, at least.
        factor: or so many times the median of the latest steps, if that is longer.
    """

    first_step_seconds: float
    minimum_seconds: float
    factor: float


@dataclass
class Activity:
    """The place of this process's main thread.

    A part is what a limit applies to: a step, an evaluation, a checkpoint. A phase lies within a part.

    Attributes:
        step: the optimizer step, counted from 1; None before training.
        phase: in a word.
        stage: the stage of the pipeline, while one computes.
        microbatch: the microbatch that it computes, counted from 0.
    """

    step: int | None = None
    phase: str = "start"
    stage: int | None = None
    microbatch: int | None = None
    _is_step: bool = False
    _began: float = field(default_factory=time.monotonic)
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))

    def begin(self, part: str) -> None:
        """Begin what is no step: an evaluation, a checkpoint."""
        self._is_step, self._began = False, time.monotonic()
        self.enter(part)

    def begin_step(self, step: int) -> None:
        """Begin a step, with waiting for its data."""
        self.step, self._is_step, self._began = step, True, time.monotonic()
        self.enter("data")

    def end_step(self) -> None:
        """Remember how long the step took."""
        self._step_seconds.append(time.monotonic() - self._began)
        self.begin("between steps")

    def enter(self, phase: str, stage: int | None = None, microbatch: int | None = None) -> None:
        """Enter a phase."""
        self.phase, self.stage, self.microbatch = phase, stage, microbatch

    def seconds_in_part(self) -> float:
        """Return how long the present part has lasted."""
        return time.monotonic() - self._began

    def limit_seconds(self, limits: HangLimits) -> float:
        """Return how long the present part may last."""
        if not self._is_step or len(self._step_seconds) < STEPS_TO_JUDGE_BY:
            return limits.first_step_seconds
        return max(limits.minimum_seconds, limits.factor * statistics.median(self._step_seconds))

    def excuse(self, seconds: float) -> None:
        """Leave out of account time in which the whole process stood still."""
        self._began += seconds

    def words(self) -> str:
        """Say it: `step 5, stage 0, microbatch 2, forward`."""
        parts = {"step": self.step, "stage": self.stage, "microbatch": self.microbatch}
        return ", ".join([*(f"{name} {value}" for name, value in parts.items() if value is not None), self.phase])
