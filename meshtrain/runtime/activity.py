"""What a process is doing: the training records it, and other threads read it."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

STEPS_REMEMBERED = 20
STEPS_TO_JUDGE_BY = 3


@dataclass(frozen=True)
class HangLimits:
    """How long the parts of a run may take before the watchdog reports a hang.

    Attributes:
        first_step_seconds: for start-up, the first steps, an evaluation, a checkpoint.
        minimum_seconds: for any other step, at least.
        factor: the limit is this multiple of the median of the latest steps, if that is longer.
    """

    first_step_seconds: float
    minimum_seconds: float
    factor: float


@dataclass
class Activity:
    """What the main thread of this process is doing.

    A limit applies to a part: a step, an evaluation or a checkpoint. A phase is a section of a
    part.

    Attributes:
        step: the optimizer step, counted from 1; None before training.
        phase: name of the phase.
        stage: the pipeline stage that is computing, if any.
        microbatch: the microbatch that it computes, counted from 0.
        listener: called by the main thread after each change of phase. Only the main thread sets
            it.
    """

    step: int | None = None
    phase: str = "start"
    stage: int | None = None
    microbatch: int | None = None
    listener: Callable[["Activity"], None] | None = None
    _is_step: bool = False
    _began: float = field(default_factory=time.monotonic)
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))

    def begin(self, part: str) -> None:
        """Begin a part that is not a step: an evaluation or a checkpoint."""
        self._is_step, self._began = False, time.monotonic()
        self.enter(part)

    def begin_step(self, step: int) -> None:
        """Begin a step. Its first phase is waiting for data."""
        self.step, self._is_step, self._began = step, True, time.monotonic()
        self.enter("data")

    def end_step(self) -> None:
        """Record how long the step took."""
        self._step_seconds.append(time.monotonic() - self._began)
        self.begin("between steps")

    def enter(self, phase: str, stage: int | None = None, microbatch: int | None = None) -> None:
        """Enter a phase."""
        self.phase, self.stage, self.microbatch = phase, stage, microbatch
        if self.listener is not None:
            self.listener(self)

    def seconds_in_part(self) -> float:
        """Return how long the current part has lasted."""
        return time.monotonic() - self._began

    def limit_seconds(self, limits: HangLimits) -> float:
        """Return how long the current part may last."""
        if not self._is_step or len(self._step_seconds) < STEPS_TO_JUDGE_BY:
            return limits.first_step_seconds
        return max(limits.minimum_seconds, limits.factor * statistics.median(self._step_seconds))

    def excuse(self, seconds: float) -> None:
        """Exclude time in which the process was suspended from the current part."""
        self._began += seconds

    def described(self) -> str:
        """Return the activity in words: `step 5, stage 0, microbatch 2, forward`."""
        parts = {"step": self.step, "stage": self.stage, "microbatch": self.microbatch}
        return ", ".join([*(f"{name} {value}" for name, value in parts.items() if value is not None), self.phase])
