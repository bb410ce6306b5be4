"""What each run of a sweep has reached, from the files of its run directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshtrain.config.run import RunConfig
from meshtrain.profiling.report.figures import last_step, numbers
from meshtrain.profiling.report.recorded import RecordedRun, read_run_directory
from meshtrain.runtime.exit_codes import INTERRUPTED, RESTART
from meshtrain.training.files import METRICS_NAME, SAVED_KEY
from meshtrain.tuning.sweep.runs import SweepRun

State = Literal["done", "failed", "to do"]
ENDED_WELL = (0, RESTART, INTERRUPTED)
"""Exit codes of a run that is done, or was asked to stop."""


@dataclass(frozen=True)
class Outcome:
    """What a run has reached.

    Attributes:
        run: of the sweep.
        recorded: what its run directory records; None if it has done no step.
        code: exit code of the run if this command has trained it.
    """

    run: SweepRun
    recorded: RecordedRun | None
    code: int | None = None

    @cached_property
    def state(self) -> State:
        """Return whether the run is done, has failed, or must still be trained."""
        if self.recorded is not None and _is_done(self.run.config, self.recorded):
            return "done"
        has_failed = self.has_failed_now or (self.recorded is not None and self.recorded.failure is not None)
        return "failed" if has_failed else "to do"

    @property
    def has_failed_now(self) -> bool:
        """Return whether this command has trained the run, and it has failed."""
        return self.code is not None and self.code not in ENDED_WELL

    @property
    def loss(self) -> float | None:
        """Return the loss by which runs are compared: of the evaluation, if there is one."""
        if self.recorded is None:
            return None
        steps = self.recorded.steps
        # With [objective], `loss` has more terms, whose weights may differ between the runs.
        losses = numbers(self.recorded.evaluations, "eval_loss") or numbers(steps, "cross_entropy")
        losses = losses or numbers(steps, "loss")
        return losses[-1] if losses else None

    def reason(self) -> str:
        """Return in one line why the run has failed."""
        if self.recorded is not None and self.recorded.failure is not None:
            return self.recorded.failure.sentence()
        return f"exit code {self.code}; its message is above"


def read_outcomes(runs: list[SweepRun], codes: Mapping[str, int]) -> list[Outcome]:
    """Return what the runs have reached.

    Args:
        runs: of the sweep.
        codes: name of a run -> its exit code, of those that this command has trained.

    Raises:
        UserError: if a file of a run directory is damaged.
    """
    return [Outcome(run, _recorded(run), codes.get(run.name)) for run in runs]


def _recorded(run: SweepRun) -> RecordedRun | None:
    metrics = run.directory / METRICS_NAME
    return read_run_directory(run.directory) if metrics.exists() and metrics.stat().st_size else None


def _is_done(config: RunConfig, recorded: RecordedRun) -> bool:
    """Return whether the last step is done and saved."""
    last = config.steps or _end_of_epochs(recorded, config.epochs or 0)
    if last is None or last_step(recorded) < last:
        return False
    return config.checkpoint.keep == 0 or any(SAVED_KEY in save and save["step"] >= last for save in recorded.saves)


def _end_of_epochs(recorded: RecordedRun, epochs: int) -> int | None:
    """Return the step with which the last epoch ends; None if it has not ended."""
    ends = (row["step"] for row in recorded.metrics if "epoch_steps" in row and row["epoch"] >= epochs)
    return next(ends, None)
