"""A run of MLflow."""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param
from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
from mlflow.exceptions import MlflowException

from meshtrain import console
from meshtrain.config.reading import shown_path
from meshtrain.config.run import RunConfig
from meshtrain.config.settings import Settings
from meshtrain.training.files import METRICS_NAME, PLAN_NAME, RUN_NAME
from meshtrain.training.trackers.sender import Sender
from meshtrain.training.trackers.tracker import PROJECT, Ending, TrackerFailed, first_line

MLFLOW_NAME = "mlflow"
END_SECONDS = 30.0
DEFAULTS = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4"}
"""MLflow prefers a database, and otherwise refuses to write a folder. Its own 7 retries take more
than 4 minutes, in which a resumption would wait; what could not be sent is sent again anyway."""
POINTS_AT_ONCE, PARAMETERS_AT_ONCE = 1000, 100
"""Limits of MLflow's servers."""
FORBIDDEN = re.compile(r"[^\w. :-]")
"""Characters that the name of a metric may not have."""
STATUS: dict[Ending, str] = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowRun:
    """A run of MLflow: at the server of MLFLOW_TRACKING_URI, or else in the run directory.

    Parameters of MLflow cannot change, so they are those of the first start. The files run.toml and
    plan.toml among the artifacts are those of the latest one.
    """

    def __init__(self, config: RunConfig, known: str | None) -> None:
        directory = Path(config.run_directory)
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        folder = directory / MLFLOW_NAME
        in_folder = not mlflow.is_tracking_uri_set()
        try:
            self._client = mlflow.MlflowClient(folder.resolve().as_uri() if in_folder else None)
            self.identifier: str = known or self._create_run(config)
            if known is not None:
                self._client.update_run(known, status="RUNNING")
            for name in (RUN_NAME, PLAN_NAME):
                self._client.log_artifact(self.identifier, str(directory / name))
        except (MlflowException, OSError) as error:
            raise TrackerFailed(
                first_line(error), "check MLFLOW_TRACKING_URI, or unset it to write a folder"
            ) from error
        self.place = shown_path(folder) if in_folder else str(self._client.tracking_uri)
        self._sender = Sender(self._send, _warn, at_once=POINTS_AT_ONCE)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        milliseconds = int(time.time() * 1000)
        self._sender.add([Metric(_metric_name(name), value, milliseconds, step) for name, value in metrics.items()])

    def end(self, ending: Ending) -> None:
        if left := self._sender.close(END_SECONDS):
            raise TrackerFailed(f"{left:,} values have not been sent")
        try:
            self._client.set_terminated(self.identifier, STATUS[ending])
        except (MlflowException, OSError) as error:
            raise TrackerFailed(first_line(error)) from error

    def _send(self, points: Sequence[Metric]) -> None:
        self._client.log_batch(self.identifier, metrics=points)

    def _create_run(self, config: RunConfig) -> str:
        name = MLFLOW_EXPERIMENT_NAME.get() or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        run = self._client.create_run(number, run_name=Path(config.run_directory).name)
        parameters = [Param(key, value) for key, value in _parameters(config)]
        for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(run.info.run_id, params=parameters[first : first + PARAMETERS_AT_ONCE])
        return run.info.run_id


def _warn(reason: str) -> None:
    console.warning(f"mlflow: {reason}; training goes on, {METRICS_NAME} has all metrics, and they are sent later")


def _metric_name(name: str) -> str:
    """Return a name that MLflow allows: a folder store has a file for each, a group is a folder."""
    group, _, rest = name.partition("/")
    return f"{group}/{FORBIDDEN.sub('_', rest.replace('/', '.'))}"


def _parameters(settings: Settings, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield full key and value of every setting that is set."""
    for name in type(settings).model_fields:
        value: Any = getattr(settings, name)
        if isinstance(value, Settings):
            yield from _parameters(value, f"{above}{name}.")
        elif value is not None:
            plain = settings.model_dump(mode="json", include={name})[name]
            yield f"{above}{name}", plain if isinstance(plain, str) else json.dumps(plain)
