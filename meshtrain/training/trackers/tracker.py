"""What the hook needs of a tracker."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from meshtrain.config.run import RunConfig
from meshtrain.errors import MeshtrainError

PROJECT = "meshtrain"
"""Project, or experiment, of a run whose user names none to the tracker."""
Ending = Literal["done", "stopped", "failed"]


class TrackerFailed(MeshtrainError):
    """A tracker cannot be opened, or does not take metrics.

    Args:
        reason: why, in one line.
        advice: what to do if it cannot be opened.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason, advice)
        self.reason, self.advice = reason, advice


class Tracker(Protocol):
    """A run of a tracker, open on rank 0.

    Attributes:
        identifier: names the run to the tracker when it is continued.
        place: where the user finds it.
    """

    identifier: str
    place: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step. It may be any step: a step before the latest, or the same.

        Raises:
            TrackerFailed: if the tracker will take no more.
        """

    def end(self, ending: Ending) -> None:
        """End the run, and wait for what has not been sent, for a limited time.

        Raises:
            TrackerFailed: if something has not been sent.
        """


def settings_table(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run, the resolved plan among them, as tables of plain values."""
    return config.model_dump(mode="json", exclude_none=True)


def first_line(error: BaseException) -> str:
    """Return the reason of a tracker's error as one line without its details."""
    return next(iter(str(error).splitlines()), "").strip(" .") or type(error).__name__
