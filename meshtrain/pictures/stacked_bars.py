"""Horizontal bars that consist of parts, against a limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshtrain.pictures.scales import Quantity, Scale, Unit, shown_value, unit_for
from meshtrain.pictures.svg import Picture, box, label, legend, line, shortened, text_width

BAR_HEIGHT, ROW_HEIGHT, FOOT = 18, 26, 38
LONGEST_NAME = 190
"""Most pixels of the names beside the bars of a wide drawing."""


@dataclass(frozen=True)
class Bar:
    """A bar.

    Attributes:
        name: of the bar.
        sizes: part -> size.
        note: more about the bar, shown under the pointer.
    """

    name: str
    sizes: Mapping[str, float]
    note: str = ""

    @property
    def total(self) -> float:
        """Return the size of all parts."""
        return sum(self.sizes.values())


@dataclass(frozen=True)
class StackedBars:
    """Bars over one axis.

    Attributes:
        title: what the bars show.
        bars: from top to bottom.
        styles: part -> style of its area, in the order in which they are drawn.
        quantity: of the sizes.
        limit: a size that the bars should not exceed.
        limit_name: what the limit is.
    """

    title: str
    bars: tuple[Bar, ...]
    styles: Mapping[str, str]
    quantity: Quantity
    limit: float | None = None
    limit_name: str = "limit"
    order: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Find the parts that a bar has.

        Raises:
            ValueError: if a part has no style.
        """
        found = {part for bar in self.bars for part, size in bar.sizes.items() if size}
        if unknown := sorted(found - self.styles.keys()):
            raise ValueError(f"{self.title}: parts without a style: {', '.join(unknown)}")
        object.__setattr__(self, "order", tuple(part for part in self.styles if part in found))


def draw_stacked_bars(chart: StackedBars, width: int) -> Picture:
    """Return the drawing of bars."""
    names, top = legend([(chart.styles[part], part) for part in chart.order], width, 0)
    top += 22 if chart.limit is not None else 8
    scale, unit = _scale(chart, width)
    bottom = top + len(chart.bars) * ROW_HEIGHT
    rows = "".join(_row(chart, bar, scale, top + index * ROW_HEIGHT) for index, bar in enumerate(chart.bars))
    # On a phone, the limit may cross totals, whose texts are then in front.
    totals = "".join(_total(chart, bar, scale, top + index * ROW_HEIGHT) for index, bar in enumerate(chart.bars))
    body = names + _axis(scale, unit, top, bottom) + rows + _limit(chart, scale, top, bottom) + totals
    return Picture(chart.title, _description(chart), width, bottom + FOOT, body)


def _scale(chart: StackedBars, width: int) -> tuple[Scale, Unit]:
    largest = max([bar.total for bar in chart.bars] + [chart.limit or 0.0, 1e-9])
    left = min(max(text_width(bar.name) for bar in chart.bars) + 8, LONGEST_NAME if width > 500 else 100)
    right = max(text_width(shown_value(bar.total, chart.quantity), strong=True) for bar in chart.bars) + 10
    return Scale(0.0, largest, left, width - right), unit_for(largest, chart.quantity)


def _axis(scale: Scale, unit: Unit, top: float, bottom: float) -> str:
    drawn = []
    for value, text in scale.ticks(max(2, int((scale.end - scale.start) / 60)), unit):
        x = scale.at(value)
        drawn.append(line(x, top, x, bottom + 4, "grid"))
        drawn.append(label(x, bottom + 17, text, anchor="middle", style="muted"))
    middle = (scale.start + scale.end) / 2
    return "".join(drawn) + label(middle, bottom + 33, unit.name, anchor="middle", style="muted small")


def _row(chart: StackedBars, bar: Bar, scale: Scale, top: float) -> str:
    baseline = top + BAR_HEIGHT - 5
    drawn = [label(scale.start - 8, baseline, shortened(bar.name, scale.start - 8), anchor="end")]
    begin = 0.0
    for part in chart.order:
        if size := bar.sizes.get(part, 0.0):
            drawn.append(_part(chart, bar, part, (scale.at(begin), scale.at(begin + size)), top))
            begin += size
    if _is_over(chart, bar):
        assert chart.limit is not None
        drawn.append(box(scale.at(chart.limit), top, scale.at(bar.total) - scale.at(chart.limit), BAR_HEIGHT, "over"))
    return "".join(drawn)


def _total(chart: StackedBars, bar: Bar, scale: Scale, top: float) -> str:
    style = "strong alarm halo" if _is_over(chart, bar) else "strong halo"
    text = shown_value(bar.total, chart.quantity)
    return label(scale.at(bar.total) + 6, top + BAR_HEIGHT - 5, text, style=style)


def _is_over(chart: StackedBars, bar: Bar) -> bool:
    return chart.limit is not None and bar.total > chart.limit


def _part(chart: StackedBars, bar: Bar, part: str, ends: tuple[float, float], top: float) -> str:
    begin, end = ends
    size, style = shown_value(bar.sizes[part], chart.quantity), chart.styles[part]
    tip = ", ".join(filter(None, (f"{bar.name}: {part} {size}", bar.note)))
    area = box(begin, top, end - begin, BAR_HEIGHT, f"{style} cell", tip=tip)
    text = next((text for text in (f"{part} {size}", part) if text_width(text) + 8 <= end - begin), "")
    if not text or style.endswith("-hatch"):
        return area
    return area + label((begin + end) / 2, top + BAR_HEIGHT - 5, text, anchor="middle", style=f"on-{style}")


def _limit(chart: StackedBars, scale: Scale, top: float, bottom: float) -> str:
    if chart.limit is None:
        return ""
    x, text = scale.at(chart.limit), f"{chart.limit_name} {shown_value(chart.limit, chart.quantity)}"
    drawn = line(x, top - 6, x, bottom, "limit")
    # Ends at the line, because there is more room than behind it.
    return drawn + label(max(x + 4, text_width(text)), top - 9, text, anchor="end", style="alarm halo")


def _description(chart: StackedBars) -> str:
    shown = [
        f"{bar.name}: {shown_value(bar.total, chart.quantity)}, of which {_parts(chart.order, bar, chart.quantity)}."
        for bar in chart.bars
    ]
    limit = [] if chart.limit is None else [f"The {chart.limit_name} is {shown_value(chart.limit, chart.quantity)}."]
    return " ".join(limit + shown)


def _parts(order: Sequence[str], bar: Bar, quantity: Quantity) -> str:
    sizes = [(part, bar.sizes[part]) for part in order if bar.sizes.get(part)]
    return ", ".join(f"{part} {shown_value(size, quantity)}" for part, size in sizes) or "nothing"
