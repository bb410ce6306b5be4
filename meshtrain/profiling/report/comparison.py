"""Predicted against measured, as tables."""

from collections import defaultdict
from collections.abc import Iterator

from meshtrain.pictures.message_bars import Messages
from meshtrain.pictures.scales import Quantity, shown_value
from meshtrain.pictures.tables import Table
from meshtrain.pictures.timeline import bubble
from meshtrain.profiling.files import Prediction, ProfiledRank, ProfileSummary
from meshtrain.profiling.report.figures import mfu, peak_memory, typical
from meshtrain.profiling.report.recorded import RecordedRun

Row = tuple[str, float | None, float | None, Quantity]
"""What is compared, predicted, measured, its quantity."""


def comparison(run: RecordedRun) -> list[Table]:
    """Return the tables of what was predicted or profiled; those without rows are left out."""
    found = []
    if run.prediction is not None:
        rows = [*_speed(run, run.prediction), *_memory(run, run.prediction), *_traffic(run, run.prediction)]
        found.append(_compared(run.prediction, rows))
    if run.summary is not None:
        found.append(_messages(run.summary))
    return [table.without_empty_columns() for table in found if table.rows]


def messages_of(rank: ProfiledRank) -> tuple[Messages, ...]:
    """Return the messages of a process, the most bytes first."""
    rows = (Messages(one.axis, one.operator, one.number, one.bytes, one.seconds) for one in rank.messages)
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _compared(prediction: Prediction, rows: list[Row]) -> Table:
    shown = tuple(
        (name, *(_shown(value, quantity, name) for value in (predicted, measured)), _ratio(predicted, measured))
        for name, predicted, measured, quantity in rows
    )
    rates = "measured rates" if prediction.measured else "assumed rates"
    about = prediction.machine if prediction.step_seconds is None else f"{prediction.machine} ({rates})"
    title = f"Predicted for {about}, and measured"
    return Table(title, ("", "predicted", "measured", "measured / predicted"), shown)


def _shown(value: float | None, quantity: Quantity, name: str) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if name in ("MFU", "bubble") else shown_value(value, quantity)


def _ratio(predicted: float | None, measured: float | None) -> str:
    return f"{measured / predicted:.2f}" if predicted and measured else ""


def _speed(run: RecordedRun, prediction: Prediction) -> Iterator[Row]:
    if prediction.step_seconds is None:
        return
    rate, summary = typical(run, "tokens_per_second"), run.summary
    yield "time of a step", prediction.step_seconds, typical(run, "seconds"), "seconds"
    each = None if rate is None else rate / prediction.world_size
    yield "tokens/s per process", prediction.tokens_per_second, each, "number"
    if prediction.mfu is not None:
        yield "MFU", prediction.mfu, mfu(run), "number"
    # From the timelines, so that both sides count alike.
    predicted = bubble(prediction.timeline) if prediction.timeline.lanes else prediction.bubble
    measured = bubble(summary.timeline) if summary is not None and summary.timeline.lanes else None
    yield "bubble", predicted, measured, "number"


def _memory(run: RecordedRun, prediction: Prediction) -> Iterator[Row]:
    if run.summary is None or not run.summary.ranks:
        # On a CPU the metric is the memory of the process, with Python and its libraries.
        measured_peak = None if prediction.is_cpu else peak_memory(run)
        yield "peak memory", max(prediction.peak_bytes, default=None), measured_peak, "bytes"
        return
    measured = peaks_by_pp_rank(run.summary, prediction)
    for pp_rank, predicted in enumerate(prediction.peak_bytes):
        yield f"peak memory, pp rank {pp_rank}", predicted, measured.get(pp_rank), "bytes"


def peaks_by_pp_rank(summary: ProfileSummary, prediction: Prediction) -> dict[int, int]:
    """Return the most bytes that a profiled process of each pp rank has used."""
    width = max(1, prediction.world_size // max(1, len(prediction.peak_bytes)))
    peaks: dict[int, int] = {}
    for rank in summary.ranks:
        peaks[rank.rank // width] = max(rank.peak_bytes, peaks.get(rank.rank // width, 0))
    return peaks


def _traffic(run: RecordedRun, prediction: Prediction) -> Iterator[Row]:
    """Compare with the process of the profile that sends the most over an axis."""
    num_bytes: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for rank in run.summary.ranks if run.summary is not None else ():
        here: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for one in rank.messages:
            here[one.axis][0] += one.bytes
            here[one.axis][1] += one.seconds
        for axis, (size, time) in here.items():
            num_bytes[axis] = max(int(size), num_bytes.get(axis, 0))
            seconds[axis] = max(time, seconds.get(axis, 0.0))
    for axis, traffic in prediction.axes.items():
        yield f"messages over {axis}", traffic.bytes, num_bytes.get(axis), "bytes"
        yield f"messages over {axis}, time", traffic.seconds, seconds.get(axis), "seconds"
        yield f"messages over {axis}, exposed time", traffic.exposed_seconds, None, "seconds"


def _messages(summary: ProfileSummary) -> Table:
    rows = tuple(
        (
            str(rank.rank),
            one.axis,
            one.operator,
            f"{one.number:,}",
            shown_value(one.bytes, "bytes"),
            shown_value(one.seconds or 0, "seconds"),
        )
        for rank in distinct_ranks(summary)
        for one in messages_of(rank)
    )
    first, last = summary.steps
    title = f"Messages of a process in a step, average of steps {first:,} to {last:,}"
    return Table(title, ("rank", "axis", "operator", "number", "bytes", "time"), rows)


def distinct_ranks(summary: ProfileSummary) -> list[ProfiledRank]:
    """Return the processes whose messages differ in number or bytes from those before."""
    seen, found = set(), []
    for rank in summary.ranks:
        kind = tuple((one.axis, one.operator, one.number, one.bytes) for one in rank.messages)
        if kind not in seen:
            seen.add(kind)
            found.append(rank)
    return found
