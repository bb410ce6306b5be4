"""The timeline of a pipeline: a lane for each process, a box for each thing that it does."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from meshtrain.pictures.scales import Scale, shown_value, unit_for
from meshtrain.pictures.svg import CHARACTER_WIDTH, Picture, box, label, legend, line, path, shortened, text_width
from meshtrain.pictures.timeline import Kind, Lane, Span, Timeline, bubble

KIND_STYLES: dict[Kind, str] = {
    "forward": "blue",
    "backward": "vermillion",
    "input gradient": "amber",
    "weight gradient": "green",
    "send": "violet",
    "wait": "faint",
    "gradients": "pink",
    "optimizer": "slate",
    "other": "grey",
}
"""What a process does -> style of its boxes, in the order of the legend."""
COMPUTATIONS: tuple[Kind, ...] = ("forward", "backward", "input gradient", "weight gradient")
LANE_HEIGHT, LANE_GAP, HEADING, FOOT = 22, 5, 30, 38
LEAST_WIDTH, MOST_WIDTH = 1060, 1600
MOST_BOXES, MOST_COLUMNS = 2_500, 8_000
"""Numbers of boxes and of columns that are drawn at most; they keep a page small."""
LEAST_BOX = 3.0
"""Pixels from which a span is a box of its own. Narrower ones are merged into columns."""


def draw_timelines(timelines: Sequence[tuple[str, Timeline]], *, title: str) -> Picture:
    """Return timelines under each other, on one scale of time.

    Args:
        timelines: name and timeline, such as "predicted" and "measured".
        title: of the drawing.
    """
    lanes = [lane for _, timeline in timelines for lane in timeline.lanes]
    width = _width(lanes)
    used = {span.kind for lane in lanes for span in lane.spans}
    names, top = legend([(style, kind) for kind, style in KIND_STYLES.items() if kind in used], width, 0)
    scale = _scale(timelines, width)
    least = max(LEAST_BOX, _width_of_a_box(lanes, scale))
    rows, bottom = [], top
    for name, timeline in timelines:
        rows.append(label(0, bottom + HEADING - 9, summary(name, timeline), style="strong"))
        bottom += HEADING
        for lane in timeline.lanes:
            row = _lane(lane, scale, bottom, least, width_of_column(len(lanes), scale))
            rows.append(row + _busy(lane, timeline, scale.end + 6, bottom))
            bottom += LANE_HEIGHT + LANE_GAP
    body = names + _axis(scale, top + HEADING, bottom) + "".join(rows)
    description = " ".join(f"{summary(name, timeline)}." for name, timeline in timelines)
    return Picture(title, description, width, bottom + FOOT, body)


def summary(name: str, timeline: Timeline) -> str:
    """Return name, time and bubble of a timeline in one line; one process has no bubble."""
    waits = f", bubble {bubble(timeline):.1%}" if len(timeline.lanes) > 1 else ""
    return f"{name}: {shown_value(timeline.seconds, 'seconds')}{waits}"


def width_of_column(num_lanes: int, scale: Scale) -> float:
    """Return the width of the columns into which narrow spans are merged, in pixels."""
    return max(LEAST_BOX, num_lanes * (scale.end - scale.start) / MOST_COLUMNS)


def _seconds(span: Span) -> float:
    return span.end_seconds - span.begin_seconds


def _width(lanes: Sequence[Lane]) -> int:
    """Return the width of a drawing: more where a lane has many boxes."""
    most = max((sum(span.kind in COMPUTATIONS for span in lane.spans) for lane in lanes), default=0)
    return min(MOST_WIDTH, max(LEAST_WIDTH, 200 + 14 * most))


def _scale(timelines: Sequence[tuple[str, Timeline]], width: int) -> Scale:
    seconds = max([timeline.seconds for _, timeline in timelines] + [1e-9])
    longest = max((text_width(lane.name) for _, timeline in timelines for lane in timeline.lanes), default=0.0)
    return Scale(0, seconds, min(longest + 8, 160.0), width - 70)


def _width_of_a_box(lanes: Sequence[Lane], scale: Scale) -> float:
    """Return the width from which so few spans are left that each may have a box."""
    per_second = (scale.end - scale.start) / (scale.high - scale.low)
    widths = sorted((_seconds(span) * per_second for lane in lanes for span in lane.spans), reverse=True)
    return widths[MOST_BOXES] if len(widths) > MOST_BOXES else 0.0


def _lane(lane: Lane, scale: Scale, top: float, least: float, column: float) -> str:
    name = shortened(lane.name, scale.start - 8)
    drawn = [
        label(scale.start - 8, top + 15, name, anchor="end"),
        box(scale.start, top, scale.end - scale.start, LANE_HEIGHT, "track"),
    ]
    boxes, narrow = [], []
    for span in lane.spans:
        x, end = scale.at(span.begin_seconds), scale.at(span.end_seconds)
        if end - x > least:
            boxes.append(_box(span, x, end - x, top))
        else:
            narrow.append((span.kind, x, end))
    return "".join([*drawn, *_columns(narrow, top, column), *boxes])


def _busy(lane: Lane, timeline: Timeline, x: float, top: float) -> str:
    busy = lane.busy_seconds
    return label(x, top + 15, f"{busy / timeline.seconds:.0%} busy" if busy else "", style="muted small")


def _box(span: Span, x: float, width: float, top: float) -> str:
    drawn = box(x, top, width, LANE_HEIGHT, f"{KIND_STYLES[span.kind]} cell", tip=_tip(span))
    if span.kind not in COMPUTATIONS or span.microbatch is None:
        return drawn
    number = str(span.microbatch)
    # The small font is narrower.
    if CHARACTER_WIDTH * 0.9 * len(number) + 2 > width:
        return drawn
    style = f"on-{KIND_STYLES[span.kind]} small"
    return drawn + label(x + width / 2, top + 15, number, anchor="middle", style=style)


def _tip(span: Span) -> str:
    where = [span.kind if span.microbatch is None else f"{span.kind} of microbatch {span.microbatch}"]
    if span.stage is not None:
        where.append(f"stage {span.stage}")
    begin = shown_value(span.begin_seconds, "seconds")
    return f"{', '.join(where)}: {shown_value(_seconds(span), 'seconds')}, begins at {begin}"


def _columns(spans: Sequence[tuple[Kind, float, float]], top: float, width: float) -> list[str]:
    """Draw narrow spans as columns, in which the height of a kind is its share of the time."""
    shares: dict[int, dict[Kind, float]] = defaultdict(lambda: defaultdict(float))
    for kind, begin, end in spans:
        for column in range(int(begin / width), int(end / width) + 1):
            covered = min(end, (column + 1) * width) - max(begin, column * width)
            shares[column][kind] += max(0.0, covered) / width
    paths = {kind: _areas(kind, shares, top, width) for kind in KIND_STYLES}
    return [path(commands, KIND_STYLES[kind]) for kind, commands in paths.items() if commands]


def _areas(kind: Kind, shares: dict[int, dict[Kind, float]], top: float, width: float) -> str:
    """Return the areas of a kind in all columns. Equal neighbors become one area."""
    heights = {column: _extent(kind, share) for column, share in sorted(shares.items())}
    areas = []
    # The columns of neighbors count up as their places in the list do.
    for (extent, _), run in groupby(enumerate(heights.items()), lambda item: (item[1][1], item[1][0] - item[0])):
        columns = [column for _, (column, _) in run]
        below, above = extent
        if above > below:
            place = f"{columns[0] * width:.5g} {top + LANE_HEIGHT - above:g}"
            areas.append(f"M{place}h{len(columns) * width:.4g}v{above - below}h-{len(columns) * width:.4g}z")
    return "".join(areas)


def _extent(kind: Kind, share: dict[Kind, float]) -> tuple[int, int]:
    """Return where the part of a kind begins and ends in a column, in pixels from its bottom."""
    kinds = list(KIND_STYLES)
    before = sum(share.get(other, 0.0) for other in kinds[: kinds.index(kind)])
    return round(before * LANE_HEIGHT), round((before + share.get(kind, 0.0)) * LANE_HEIGHT)


def _axis(scale: Scale, top: float, bottom: float) -> str:
    unit = unit_for(scale.high, "seconds")
    drawn = []
    for value, text in scale.ticks(8, unit):
        x = scale.at(value)
        drawn.append(line(x, top, x, bottom + 3, "grid"))
        drawn.append(label(x, bottom + 17, text, anchor="middle", style="muted"))
    middle = (scale.start + scale.end) / 2
    return "".join(drawn) + label(middle, bottom + 33, unit.name, anchor="middle", style="muted small")
