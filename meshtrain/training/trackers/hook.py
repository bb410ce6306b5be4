"""The built-in hook that opens a tracker on rank 0, and passes the metrics on."""

from pathlib import Path

from meshtrain import console
from meshtrain.config.run import RunConfig, TrackerName
from meshtrain.errors import ConfigError
from meshtrain.runtime.agreement import failing_together
from meshtrain.training.directory import metrics_lines
from meshtrain.training.epoch_averages import EpochAverages
from meshtrain.training.files import METRICS_NAME
from meshtrain.training.hooks import Hook, Metrics, RunState
from meshtrain.training.metrics import grouped
from meshtrain.training.trackers.identifiers import read_identifiers, write_identifier
from meshtrain.training.trackers.tracker import Ending, Tracker, TrackerFailed


class TrackerHook(Hook):
    """Passes the metrics to a tracker, under the names that TensorBoard shows.

    One run of the tracker belongs to a run directory: a resumption or a rewind continues it.

    A tracker that cannot be opened stops the first start of a run, where the user sees it. Later
    failures are warnings, because metrics.jsonl has the metrics.
    """

    def __init__(self, name: TrackerName) -> None:
        self._name = name
        self._tracker: Tracker | None = None
        self._was_opened = False
        self._averages = EpochAverages()

    def on_start(self, state: RunState, metrics: Metrics) -> None:
        """Open the tracker at the start; after a rewind its run goes on."""
        self._averages = EpochAverages()
        if not self._was_opened:
            self._was_opened = True
            with failing_together(ConfigError):
                if state.is_first_rank:
                    self._open(state.config)
        if self._tracker is not None:
            # The hook of metrics.jsonl has dropped the lines of later steps.
            for _, written in metrics_lines(Path(state.config.run_directory) / METRICS_NAME):
                self._averages.add(written)

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Pass the step on, and the averages of its epoch if the epoch is over."""
        self._log(state.step, metrics)
        self._averages.add(metrics)
        if state.epoch_ends:
            self._log(state.step, self._averages.averages())

    def on_evaluation(self, state: RunState, metrics: Metrics) -> None:
        """Pass the evaluation on."""
        self._log(state.step, metrics)

    def on_scores(self, state: RunState, metrics: Metrics) -> None:
        """Pass the scores on. The trackers have no place for texts."""
        if metrics:
            self._log(state.step, metrics)

    def on_checkpoint(self, state: RunState, metrics: Metrics) -> None:
        """Pass on how long the save took."""
        self._log(state.step if state.saved is None else state.saved.step, metrics)

    def on_end(self, state: RunState, metrics: Metrics) -> None:
        """End the run of the tracker; the run itself may resume, and then continues it."""
        if self._tracker is None:
            return
        ending: Ending = "done" if state.stopped_by is None else "stopped"
        try:
            self._tracker.end("failed" if state.failure is not None else ending)
        except TrackerFailed as failed:
            console.warning(f"{self._name}: {failed.reason}; {METRICS_NAME} has all metrics")
        self._tracker = None

    def _open(self, config: RunConfig) -> None:
        directory = Path(config.run_directory)
        known = read_identifiers(directory).get(self._name)
        try:
            self._tracker = _open_tracker(self._name, config, known)
        except TrackerFailed as failed:
            if known is None:
                raise ConfigError(f"logging.trackers: {self._name}: {failed.reason}", failed.advice) from failed
            console.warning(
                f"{self._name}: {failed.reason}; training goes on without this tracker, and {METRICS_NAME} has all "
                "metrics"
            )
            return
        if self._tracker.identifier != known:
            write_identifier(directory, self._name, self._tracker.identifier)
        console.line(
            f"Tracker {self._name}: run {self._tracker.identifier} {'is at' if known is None else 'goes on at'} "
            f"{self._tracker.place}"
        )

    def _log(self, step: int, metrics: Metrics) -> None:
        if self._tracker is None or not metrics:
            return
        try:
            self._tracker.log(step, {grouped(name): value for name, value in metrics.items()})
        except TrackerFailed as failed:
            self._tracker = None
            console.warning(
                f"{self._name}: {failed.reason}; it gets no more metrics. Training goes on, and {METRICS_NAME} has all "
                "of them"
            )


def _open_tracker(name: TrackerName, config: RunConfig, known: str | None) -> Tracker:
    """Open a new run of a tracker, or the one that is known.

    Raises:
        TrackerFailed: if that is not possible.
    """
    # Each module loads its package, which is that of an extra.
    if name == "wandb":
        from meshtrain.training.trackers.wandb_run import WandbRun  # noqa: PLC0415

        return WandbRun(config, known)
    if name == "mlflow":
        from meshtrain.training.trackers.mlflow_run import MlflowRun  # noqa: PLC0415

        return MlflowRun(config, known)
    from meshtrain.training.trackers.trackio_run import TrackioRun  # noqa: PLC0415

    return TrackioRun(config, known)
