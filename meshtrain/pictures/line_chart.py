"""Lines over the steps of a run, with marks for what happened."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from meshtrain.pictures.colors import MOST_LINES
from meshtrain.pictures.scales import Quantity, Scale, Unit, padded_range, shown_value, unit_for
from meshtrain.pictures.svg import Picture, box, dot, label, legend, line, path, text_width

EventKind = Literal["checkpoint", "restart", "bad step", "proposal"]
Point = tuple[float, float]
MOST_TIPS = 60
"""Number of places of a chart that show their values under the pointer."""


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        name: of the line.
        points: position and value, in order. A value that is None or not finite makes a gap.
    """

    name: str
    points: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        position: where.
        kind: decides the mark.
        text: what happened, in a sentence.
    """

    position: float
    kind: EventKind
    text: str


@dataclass(frozen=True)
class LineChart:
    """One or several lines over one axis.

    Attributes:
        title: what the lines show.
        series: the lines; at most MOST_LINES.
        unit: of the values, if `quantity` is "number".
        quantity: decides the unit of the axis.
        position_name: of the horizontal axis.
        events: marks.
        is_log: whether the vertical axis is logarithmic. Values that are not positive make a gap.
        is_position_log: whether the horizontal axis is logarithmic. All positions are positive.
        from_zero: whether the vertical axis begins at zero.
        most: end of the vertical axis, if values may be larger; these are drawn at its edge.
    """

    title: str
    series: tuple[Series, ...]
    unit: str = ""
    quantity: Quantity = "number"
    position_name: str = "step"
    events: tuple[Event, ...] = ()
    is_log: bool = False
    is_position_log: bool = False
    from_zero: bool = False
    most: float | None = None


@dataclass(frozen=True)
class _Frame:
    """The area between the axes."""

    across: Scale
    up: Scale
    unit: Unit

    @property
    def top(self) -> float:
        return self.up.end

    @property
    def bottom(self) -> float:
        return self.up.start


def draw_line_chart(chart: LineChart, width: int) -> Picture:
    """Return the drawing of a chart.

    Raises:
        ValueError: if there are too many lines.
    """
    if len(chart.series) > MOST_LINES:
        raise ValueError(f"{chart.title}: a chart has at most {MOST_LINES} lines, not {len(chart.series)}")
    runs = [list(_runs(one, chart.is_log)) for one in chart.series]
    names, legend_height = _legend(chart, width)
    if not any(runs):
        body = names + label(width / 2, legend_height + 40, "no values", anchor="middle", style="muted")
        return Picture(chart.title, "There are no values.", width, legend_height + 70, body)
    frame = _frame(chart, runs, width, legend_height)
    lines = "".join(_curve(run, index, frame) for index, several in enumerate(runs) for run in several)
    drawn = [_axes(chart, frame), _events(chart, frame), lines, _last_value(chart, runs, frame), _tips(chart, frame)]
    return Picture(chart.title, _description(chart, runs), width, frame.bottom + 38, names + "".join(drawn))


def _runs(series: Series, is_log: bool) -> Iterator[list[Point]]:
    """Yield the parts of a line between its gaps."""
    run: list[Point] = []
    for position, value in series.points:
        if value is not None and math.isfinite(value) and (value > 0 or not is_log):
            run.append((position, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _legend(chart: LineChart, width: int) -> tuple[str, float]:
    if len(chart.series) < 2:
        return "", 0.0
    entries = [(f"line{index}", one.name) for index, one in enumerate(chart.series)]
    return legend(entries, width, 0, sample=_line_sample, sample_width=22)


def _line_sample(x: float, y: float, style: str) -> str:
    return line(x, y, x + 22, y, f"curve {style}")


def _frame(chart: LineChart, runs: Sequence[Sequence[Sequence[Point]]], width: int, legend_height: float) -> _Frame:
    points = [point for several in runs for run in several for point in run]
    low, high = padded_range(
        [min(value, chart.most or value) for _, value in points], from_zero=chart.from_zero, is_log=chart.is_log
    )
    first, last = min(position for position, _ in points), max(position for position, _ in points)
    if first == last:
        first, last = (first / 2, last * 2) if chart.is_position_log else (first - 1, last + 1)
    unit = unit_for(high, chart.quantity) if chart.quantity != "number" else Unit(chart.unit, 1)
    top = legend_height + (38 if chart.events else 20)
    up = Scale(low, high, top + (150 if width < 500 else 250), top, chart.is_log)
    left = max(text_width(text) for _, text in up.ticks(5, unit)) + 8
    right = text_width(shown_value(points[-1][1] / unit.size), strong=True) if len(chart.series) == 1 else 0
    # Half of the text of the last tick.
    right = max(right + 8, text_width(f"{last:,.0f}") / 2)
    return _Frame(Scale(first, last, left, width - right, chart.is_position_log), up, unit)


def _axes(chart: LineChart, frame: _Frame) -> str:
    across, up = frame.across, frame.up
    drawn = []
    for value, text in up.ticks(5, frame.unit):
        y = up.at(value)
        drawn.append(line(across.start, y, across.end, y, "grid"))
        drawn.append(label(across.start - 6, y + 4, text, anchor="end", style="muted"))
    for value, text in across.ticks(max(2, int((across.end - across.start) / 70))):
        if value != int(value) and chart.position_name == "step":
            continue
        x = across.at(value)
        drawn.append(line(x, frame.bottom, x, frame.bottom + 4, "grid"))
        drawn.append(label(x, frame.bottom + 17, text, anchor="middle", style="muted"))
    drawn.append(line(across.start, frame.bottom, across.end, frame.bottom, "frame"))
    middle = (across.start + across.end) / 2
    below = chart.position_name + (", logarithmic" if chart.is_position_log else "")
    drawn.append(label(middle, frame.bottom + 33, below, anchor="middle", style="muted small"))
    above = frame.unit.name + (", logarithmic" if chart.is_log else "")
    drawn.append(label(0, frame.top - (28 if chart.events else 9), above.removeprefix(", "), style="muted small"))
    return "".join(drawn)


def _curve(run: Sequence[Point], index: int, frame: _Frame) -> str:
    pixels = [(frame.across.at(position), frame.up.at(value)) for position, value in run]
    if len(pixels) == 1:
        return dot(*pixels[0], 2.5, f"square{index}")
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in _thinned(pixels))
    return f'<polyline class="curve line{index}" points="{points}"/>'


def _thinned(pixels: Sequence[Point]) -> Iterator[Point]:
    """Yield the points that are visible: of each column of pixels first, lowest, highest, last."""
    begin = 0
    for end in range(1, len(pixels) + 1):
        if end < len(pixels) and int(pixels[end][0]) == int(pixels[begin][0]):
            continue
        column = range(begin, end)
        low = min(column, key=lambda place: pixels[place][1])
        high = max(column, key=lambda place: pixels[place][1])
        yield from (pixels[place] for place in sorted({begin, low, high, end - 1}))
        begin = end


def _last_value(chart: LineChart, runs: Sequence[Sequence[Sequence[Point]]], frame: _Frame) -> str:
    if len(chart.series) != 1:
        return ""
    position, value = runs[0][-1][-1]
    x, y = frame.across.at(position), frame.up.at(value)
    text = shown_value(value / frame.unit.size)
    return dot(x, y, 3, "square0") + label(x + 6, y + 4, text, style="strong halo")


def _events(chart: LineChart, frame: _Frame) -> str:
    """Draw restarts and proposals as lines over the whole height, the others as small marks."""
    drawn, seen = [], set()
    for event in chart.events:
        if not frame.across.low <= event.position <= frame.across.high:
            continue
        x = frame.across.at(event.position)
        if (event.kind, round(x)) in seen:
            continue
        seen.add((event.kind, round(x)))
        drawn.append(_mark(event, x, frame))
    return "".join(drawn)


def _mark(event: Event, x: float, frame: _Frame) -> str:
    top = frame.top - 9
    if event.kind in ("restart", "proposal"):
        flag = path(f"M{x:.1f} {top - 9:.1f}l7 4.5l-7 4.5z", "mark", tip=event.text)
        return line(x, top - 9, x, frame.bottom, "event") + flag
    if event.kind == "bad step":
        return path(f"M{x - 4:.1f} {top - 8:.1f}l8 8m0 -8l-8 8", "over", tip=event.text)
    return path(f"M{x - 3.5:.1f} {frame.bottom:.1f}l3.5 -6l3.5 6z", "mark", tip=event.text)


def _tips(chart: LineChart, frame: _Frame) -> str:
    """Return invisible strips that show the values of a position under the pointer."""
    values: dict[float, list[str]] = {}
    for one in chart.series:
        for position, value in one.points:
            text = "no value" if value is None else shown_value(value, chart.quantity)
            values.setdefault(position, []).append(f"{one.name} {text}")
    positions = sorted(values)
    every = math.ceil(len(positions) / MOST_TIPS)
    chosen = positions[::every]
    edges = [(frame.across.at(one) + frame.across.at(other)) / 2 for one, other in pairwise(chosen)]
    borders = [frame.across.start, *edges, frame.across.end]
    return "".join(
        box(
            borders[index],
            frame.top,
            borders[index + 1] - borders[index],
            frame.bottom - frame.top,
            "hover",
            tip=f"{chart.position_name} {position:,g}: {', '.join(values[position])}",
        )
        for index, position in enumerate(chosen)
    )


def _description(chart: LineChart, runs: Sequence[Sequence[Sequence[Point]]]) -> str:
    unit = f" {chart.unit}" if chart.unit and chart.quantity == "number" else ""
    lines = [
        f"{one.name}: {shown_value(several[0][0][1], chart.quantity)}{unit} at {chart.position_name} "
        f"{several[0][0][0]:,g}, {shown_value(several[-1][-1][1], chart.quantity)}{unit} at {chart.position_name} "
        f"{several[-1][-1][0]:,g}."
        for one, several in zip(chart.series, runs, strict=True)
        if several
    ]
    return " ".join([*lines, *(f"{event.text}." for event in chart.events[:20])])


def events_legend(chart: LineChart) -> str:
    """Return a sentence that explains the marks of a chart; empty if it has none."""
    names = {
        "checkpoint": "triangle on the axis: checkpoint",
        "restart": "flag: the run started again",
        "bad step": "cross: bad step",
        "proposal": "flag: a proposal",
    }
    kinds = {event.kind for event in chart.events}
    text = "; ".join(name for kind, name in names.items() if kind in kinds)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
