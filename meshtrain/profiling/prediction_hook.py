"""The hook that shows what was predicted for a run, beside what the run did.

RUN/prediction.json  the prediction, see meshtrain.profiling.files
"""

from pathlib import Path

from meshtrain import console
from meshtrain.planning.machine import find_machine
from meshtrain.planning.remarks import compilation_remark
from meshtrain.profiling.comparison import MeasuredHook, comparison_lines, prediction_lines
from meshtrain.profiling.files import Prediction, read_summary
from meshtrain.profiling.prediction import read_or_predict
from meshtrain.profiling.prediction_file import keep_prediction, remove_prediction
from meshtrain.training.hooks import Metrics, RunState
from meshtrain.training.resolve import ResolvedRun

FEWEST_STEPS = 5
"""Number of measured steps from which a comparison is shown."""


class PredictionHook(MeasuredHook):
    """Shows what is predicted for a run, and at the end what was measured.

    Args:
        machine: name of the machine for which it is predicted.
    """

    def __init__(self, machine: str) -> None:
        super().__init__()
        self._machine = machine
        self._prediction: Prediction | None = None

    def predict(self, resolved: ResolvedRun) -> None:
        """Find and show what is predicted, before the process group is joined.

        It is shown this early because a run that does not fit may fail while it is built. All
        processes call this at once.
        """
        found = read_or_predict(resolved, find_machine(self._machine, resolved.plan.mesh.world_size))
        if isinstance(found, str):
            console.line(f"Memory and time of a step are not predicted: {found}")
            return
        self._prediction = found
        for line in [*prediction_lines(found), compilation_remark(resolved)]:
            if line:
                console.line(line)

    def on_start(self, state: RunState, metrics: Metrics) -> None:
        """Write the prediction into the run directory, or remove that of an earlier plan."""
        if self._prediction is None:
            remove_prediction(state)
        else:
            keep_prediction(state, self._prediction)

    def on_end(self, state: RunState, metrics: Metrics) -> None:
        """Show what was measured, unless the run failed or was too short."""
        prediction = self._prediction
        if prediction is None or state.failure is not None or self.num_measured_steps < FEWEST_STEPS:
            return
        if not state.is_first_rank:
            return
        has_profile = state.config.profile.steps is not None
        profile = read_summary(Path(state.config.run_directory)) if has_profile else None
        for line in comparison_lines(
            step_seconds=prediction.step_seconds,
            peak_bytes=max(prediction.peak_bytes),
            measured=self.measurement(profile),
        ):
            console.line(line)
