"""A run of trackio."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import trackio
from trackio.utils import TRACKIO_DIR

from meshtrain.config.run import RunConfig
from meshtrain.training.trackers.tracker import PROJECT, Ending, TrackerFailed, first_line, settings_table


class TrackioRun:
    """A run of trackio, whose thread writes into its database and uploads from there.

    The settings of trackio hold, such as TRACKIO_DIR and TRACKIO_SPACE_ID. A call never waits for a
    server, and trackio itself warns of what it cannot write.
    """

    def __init__(self, config: RunConfig, known: str | None) -> None:
        # trackio continues a run by its name, which two run directories may share.
        self.identifier = known or f"{Path(config.run_directory).name}-{uuid4().hex[:8]}"
        try:
            self._run = trackio.init(
                PROJECT, name=self.identifier, config=settings_table(config), resume="allow", embed=False
            )
        except (ValueError, OSError) as error:
            raise TrackerFailed(first_line(error), "check the variables TRACKIO_*") from error
        self.place = str(self._run.url or TRACKIO_DIR)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def end(self, ending: Ending) -> None:
        trackio.finish()
