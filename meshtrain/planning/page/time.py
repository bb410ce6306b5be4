"""Where the time of a step goes, and the messages in it."""

from meshtrain.pictures.message_bars import Messages
from meshtrain.pictures.stacked_bars import Bar, StackedBars
from meshtrain.planning.needs import Needs
from meshtrain.planning.speed.step_time import StepTime

MESSAGE_STYLES = {"exposed": "vermillion", "behind computation": "blue"}


def message_seconds(time: StepTime) -> StackedBars:
    """Return the seconds of messages over each axis, as bars."""
    bars = tuple(
        Bar(
            axis,
            {"exposed": times.exposed_seconds, "behind computation": max(0.0, times.seconds - times.exposed_seconds)},
        )
        for axis, times in sorted(time.replay.axes.items())
    )
    return StackedBars("Time of the messages over each axis", bars, MESSAGE_STYLES, "seconds")


def most_messages(needs: Needs) -> tuple[int, tuple[Messages, ...]]:
    """Return the group of processes that sends most, and its messages, the largest first."""
    rows = [
        [Messages(axis, name, number, size) for (axis, name), (number, size) in total.messages.items()]
        for total in needs.totals
    ]
    group = max(range(len(rows)), key=lambda index: sum(row.bytes for row in rows[index]))
    return group, tuple(sorted(rows[group], key=lambda row: -row.bytes))
