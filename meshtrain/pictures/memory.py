"""The memory of processes: what it consists of at the peak, and how it changes over a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from meshtrain.pictures.scales import Quantity, Scale, Unit, shown_value, unit_for
from meshtrain.pictures.stacked_bars import Bar, StackedBars, draw_stacked_bars
from meshtrain.pictures.svg import (
    CHARACTER_WIDTH,
    STRONG_CHARACTER_WIDTH,
    Picture,
    box,
    dot,
    label,
    legend,
    line,
    path,
    shown,
    text_width,
    wrapped,
)

MEMORY_STYLES = {
    "parameters": "blue",
    "gathered": "blue-hatch",
    "gradients": "amber",
    "unreduced": "amber-hatch",
    "optimizer": "green",
    "activations": "vermillion",
    "loss": "pink",
    "messages": "violet",
    "temporary": "slate",
    "reserved": "grey",
    "fragmentation": "grey-hatch",
}
"""Part of memory -> style of its area, in the order of every drawing."""
MOST_TIPS = 120


@dataclass(frozen=True)
class MemoryBar:
    """The memory of one process, or of several that need the same.

    Attributes:
        name: such as "ranks 0-7".
        parts: part -> bytes; the parts are the keys of `MEMORY_STYLES`.
        when: the moment at which the memory consists of these parts, in words.
    """

    name: str
    parts: Mapping[str, int]
    when: str = ""


@dataclass(frozen=True)
class Moment:
    """The memory of one process from a moment until the next.

    Attributes:
        position: seconds since the begin of the step, or the index of an action.
        name: what happens, in words.
        parts: part -> bytes.
    """

    position: float
    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Return the bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryCurve:
    """The memory of one process over a step.

    Attributes:
        name: of the process or processes.
        moments: in order; at least one.
        end: position of the end of the step.
        unit: of the positions.
        limit_bytes: that may be used.
        limit_name: what the limit is.
    """

    name: str
    moments: tuple[Moment, ...]
    end: float
    unit: Literal["seconds", "actions"]
    limit_bytes: int | None = None
    limit_name: str = "limit"

    @property
    def peak(self) -> Moment:
        """Return the first moment with the most memory."""
        return max(self.moments, key=lambda moment: moment.total)


def draw_memory_bars(bars: Sequence[MemoryBar], width: int, *, limit_bytes: int | None, title: str) -> Picture:
    """Return the memory of processes as stacked bars.

    Args:
        bars: from top to bottom.
        width: of the drawing, in pixels.
        limit_bytes: memory of the device.
        title: of the drawing.
    """
    rows = tuple(Bar(bar.name, bar.parts, bar.when) for bar in bars)
    chart = StackedBars(title, rows, MEMORY_STYLES, "bytes", limit_bytes, "limit")
    return draw_stacked_bars(chart, width)


def draw_memory_curve(curve: MemoryCurve, width: int) -> Picture:
    """Return the memory of a process over a step, as stacked areas with the peak marked."""
    title = f"Memory over the step, {curve.name}"
    parts = [part for part in MEMORY_STYLES if any(moment.parts.get(part) for moment in curve.moments)]
    names, top = legend([(MEMORY_STYLES[part], part) for part in parts], width, 0)
    peak = f"Peak {shown_value(curve.peak.total, 'bytes')}: {curve.peak.name}"
    peak_lines = wrapped(peak, width * CHARACTER_WIDTH / STRONG_CHARACTER_WIDTH)
    texts = "".join(label(0, top + 16 + 15 * index, text, style="strong") for index, text in enumerate(peak_lines))
    top += 15 * len(peak_lines) + 34
    across, up, unit = _scales(curve, width, top)
    visible = _visible(curve, across)
    areas = "".join(_areas(visible, parts, across, up))
    body = names + texts + _axes(curve, across, up, unit) + areas + _peak(curve, across, up)
    body += _limit(curve, across, up) + _tips(curve, visible, across, up)
    return Picture(title, _description(curve, parts), width, up.start + 38, body)


def _scales(curve: MemoryCurve, width: int, top: float) -> tuple[Scale, Scale, Unit]:
    highest = max(curve.peak.total, curve.limit_bytes or 0, 1)
    unit = unit_for(highest, "bytes")
    up = Scale(0, highest * 1.04, top + (170 if width < 500 else 280), top)
    left = max(text_width(text) for _, text in up.ticks(5, unit)) + 8
    return Scale(0, max(curve.end, 1e-9), left, width - 12), up, unit


def _visible(curve: MemoryCurve, across: Scale) -> list[tuple[float, Moment]]:
    """Return the moments that are visible, each with its pixel: of each half pixel the highest."""
    highest: dict[int, Moment] = {}
    for moment in curve.moments:
        column = int(across.at(moment.position) * 2)
        if column not in highest or moment.total > highest[column].total:
            highest[column] = moment
    return [(across.at(moment.position), moment) for moment in highest.values()]


def _areas(visible: Sequence[tuple[float, Moment]], parts: Sequence[str], across: Scale, up: Scale) -> Sequence[str]:
    """Return an area for each part, on top of the parts before it."""
    ends = [*(x for x, _ in visible[1:]), across.end]
    tops = [[0, *accumulate(moment.parts.get(part, 0) for part in parts)] for _, moment in visible]
    drawn = []
    for index, part in enumerate(parts):
        above = [(x, end, up.at(level[index + 1])) for (x, _), end, level in zip(visible, ends, tops, strict=True)]
        below = [(x, end, up.at(level[index])) for (x, _), end, level in zip(visible, ends, tops, strict=True)]
        there = "".join(f"L{shown(x)} {shown(y)}H{shown(end)}" for x, end, y in above)
        back = "".join(f"L{shown(end)} {shown(y)}H{shown(x)}" for x, end, y in reversed(below))
        drawn.append(path(f"M{there[1:]}{back}z", MEMORY_STYLES[part]))
    return drawn


def _axes(curve: MemoryCurve, across: Scale, up: Scale, unit: Unit) -> str:
    drawn = [label(0, up.end - 9, unit.name, style="muted small")]
    for value, text in up.ticks(5, unit):
        y = up.at(value)
        drawn.append(line(across.start, y, across.end, y, "grid"))
        drawn.append(label(across.start - 6, y + 4, text, anchor="end", style="muted"))
    quantity: Quantity = "seconds" if curve.unit == "seconds" else "number"
    time = unit_for(across.high, quantity)
    for value, text in across.ticks(max(2, int((across.end - across.start) / 70)), time):
        x = across.at(value)
        drawn.append(label(x, up.start + 17, text, anchor="middle", style="muted"))
    drawn.append(line(across.start, up.start, across.end, up.start, "frame"))
    middle, name = (across.start + across.end) / 2, time.name if quantity == "seconds" else "actions of the step"
    return "".join(drawn) + label(middle, up.start + 33, name, anchor="middle", style="muted small")


def _peak(curve: MemoryCurve, across: Scale, up: Scale) -> str:
    x, y = across.at(curve.peak.position), up.at(curve.peak.total)
    tip = f"Peak {shown_value(curve.peak.total, 'bytes')}: {curve.peak.name}"
    return line(x, up.start, x, y, "event") + dot(x, y, 4.5, "mark cell", tip=tip)


def _limit(curve: MemoryCurve, across: Scale, up: Scale) -> str:
    if curve.limit_bytes is None:
        return ""
    y = up.at(curve.limit_bytes)
    text = f"{curve.limit_name} {shown_value(curve.limit_bytes, 'bytes')}"
    drawn = line(across.start, y, across.end, y, "limit")
    return drawn + label(across.end, up.end - 9, text, anchor="end", style="alarm halo")


def _tips(curve: MemoryCurve, visible: Sequence[tuple[float, Moment]], across: Scale, up: Scale) -> str:
    every = -(-len(visible) // MOST_TIPS)
    chosen = visible[::every]
    ends = [*(x for x, _ in chosen[1:]), across.end]
    return "".join(
        box(x, up.end, end - x, up.start - up.end, "hover", tip=f"{moment.name}: {_sizes(moment, MEMORY_STYLES)}")
        for (x, moment), end in zip(chosen, ends, strict=True)
    )


def _sizes(moment: Moment, parts: Sequence[str] | Mapping[str, str]) -> str:
    sizes = [(part, moment.parts[part]) for part in parts if moment.parts.get(part)]
    return ", ".join(
        [shown_value(moment.total, "bytes"), *(f"{name} {shown_value(size, 'bytes')}" for name, size in sizes)]
    )


def _description(curve: MemoryCurve, parts: Sequence[str]) -> str:
    limit = (
        "" if curve.limit_bytes is None else f" The {curve.limit_name} is {shown_value(curve.limit_bytes, 'bytes')}."
    )
    return f"The peak is at {curve.peak.name}: {_sizes(curve.peak, parts)}.{limit}"
