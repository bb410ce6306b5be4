"""A run of Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path

import wandb

from meshtrain.config.reading import shown_path
from meshtrain.config.run import RunConfig
from meshtrain.training.trackers.tracker import PROJECT, Ending, TrackerFailed, first_line, settings_table

END_SECONDS = 30.0
FLUSH_SECONDS = 1.0
"""W&B writes every 15 s, and a kill would cost that much, also of steps before a checkpoint."""
STEP = "step"
"""The metric over which the others are drawn. W&B's own step cannot go back after a resumption."""


class WandbRun:
    """A run of Weights & Biases, whose process writes into the run directory and uploads.

    The settings of W&B hold, such as WANDB_MODE=offline and WANDB_PROJECT. A call never waits for
    the server: without network, everything stays in the run directory for `wandb sync`.
    """

    def __init__(self, config: RunConfig, known: str | None) -> None:
        directory = Path(config.run_directory)
        own = wandb.setup().settings
        try:
            self._run = wandb.init(
                project=own.project or PROJECT,
                # The user may have renamed a run that is continued.
                name=(own.run_name or directory.name) if known is None else None,
                id=known,
                resume=None if known is None else "allow",
                dir=directory,
                config=settings_table(config),
                allow_val_change=True,
                # A program may have a run of its own.
                reinit="create_new",
                settings=wandb.Settings(
                    console="off",
                    quiet=True,
                    finish_timeout=END_SECONDS,
                    x_transaction_log_flush_interval=FLUSH_SECONDS,
                ),
            )
        except (wandb.Error, OSError) as error:
            raise TrackerFailed(first_line(error), "run `wandb login`, or set WANDB_MODE=offline") from error
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self.identifier: str = self._run.id
        self.place = shown_path(directory / "wandb") if self._run.offline else str(self._run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._run.log({STEP: step, **metrics})
        except (wandb.Error, OSError) as error:
            raise TrackerFailed(first_line(error)) from error

    def end(self, ending: Ending) -> None:
        try:
            self._run.finish(exit_code=1 if ending == "failed" else 0)
        except (wandb.Error, OSError) as error:
            raise TrackerFailed(first_line(error)) from error
