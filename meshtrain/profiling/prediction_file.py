"""The prediction in the directory of a run, see meshtrain.profiling.files."""

import json
from pathlib import Path

from meshtrain.config.reading import shown_path
from meshtrain.data.cache import write_atomically
from meshtrain.errors import Problem, reason_of
from meshtrain.profiling.files import Prediction, prediction_path
from meshtrain.training.hooks import Hook, Metrics, RunState


class NoPrediction(Hook):
    """Removes the prediction of an earlier start, for a run of which nothing is predicted."""

    def on_start(self, state: RunState, metrics: Metrics) -> None:
        """Remove the file, if there is one."""
        remove_prediction(state)


def remove_prediction(state: RunState) -> None:
    """Remove the prediction of an earlier start from the directory of a run."""
    if not state.is_first_rank:
        return
    path = prediction_path(Path(state.config.run_directory))
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        state.report_problem(
            Problem(
                f"cannot remove {shown_path(path)}, the prediction of an earlier start: {reason_of(error)}",
                "remove it, then start the run again",
            )
        )


def keep_prediction(state: RunState, prediction: Prediction) -> None:
    """Write a prediction into the directory of a run."""
    if not state.is_first_rank:
        return
    path = prediction_path(Path(state.config.run_directory))
    try:
        write_atomically(path, json.dumps(prediction.to_json()))
    except OSError as error:
        state.report_problem(
            Problem(
                f"cannot write {shown_path(path)}: {reason_of(error)}, so training stopped",
                'free disk space, or set machine = "none", then start the run again; it resumes from its newest '
                "checkpoint",
            )
        )
