"""The lines and the table that show a profile."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median_low

from meshtrain import console
from meshtrain.config.reading import shown_path
from meshtrain.pictures.timeline import bubble
from meshtrain.planning.names import gib
from meshtrain.profiling.files import ProfileSummary


def show_profile(summary: ProfileSummary, exposed: Sequence[Mapping[str, float]], directory: Path) -> None:
    """Print a profile in a few lines.

    Args:
        summary: of all processes.
        exposed: of each process, axis -> seconds in which only messages were under way.
        directory: where its files are.
    """
    first, last = summary.steps
    rows = _message_rows(summary, exposed)
    if rows:
        console.table(
            f"Messages of step {last:,}, mean of the processes",
            ["axis", "number", "GiB", "seconds", "without computation"],
            rows,
        )
    for line in profile_lines(summary):
        console.line(line)
    console.line(
        f"Profile of steps {first:,} to {last:,}: {shown_path(directory)}; traces open in https://ui.perfetto.dev"
    )


def profile_lines(summary: ProfileSummary) -> list[str]:
    """Return the times and the memory of a profile in words."""
    fullest = max(summary.ranks, key=lambda rank: rank.peak_bytes)
    number = len(summary.step_seconds)
    lines = [
        f"Measured step: {median_low(summary.step_seconds):.3f} s{f', median of {number}' if number > 1 else ''}",
        f"Measured peak memory: {gib(fullest.peak_bytes)} GiB, on rank {fullest.rank}",
    ]
    waits = any(span.kind == "wait" for lane in summary.timeline.lanes for span in lane.spans)
    share = f"Bubble: {bubble(summary.timeline):.1%} of the time, in which processes wait for others"
    return [*lines, share] if waits else lines


def _message_rows(summary: ProfileSummary, exposed: Sequence[Mapping[str, float]]) -> list[tuple[str, ...]]:
    numbers: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for rank in summary.ranks:
        for message in rank.messages:
            sums = numbers[message.axis]
            sums[0] += message.number
            sums[1] += message.bytes
            sums[2] += message.seconds
    ranks = len(summary.ranks)
    return [
        (
            axis,
            f"{number / ranks:,.0f}",
            gib(round(size / ranks)),
            f"{seconds / ranks:.3f}",
            f"{fmean(found.get(axis, 0.0) for found in exposed):.3f}",
        )
        for axis, (number, size, seconds) in sorted(numbers.items())
    ]
