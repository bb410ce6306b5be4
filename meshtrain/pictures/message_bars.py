"""Bytes of messages by axis of the mesh and operator, as horizontal bars."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshtrain.pictures.scales import Scale, shown_value
from meshtrain.pictures.svg import Picture, box, label, text_width

AXIS_STYLES = {
    "pp": "blue",
    "dp_replicate": "amber",
    "dp_shard": "green",
    "dp_shard_cp": "green",
    "dp_shard_ep_cp": "green",
    "cp": "pink",
    "tp": "vermillion",
    "ep": "violet",
}
OTHER_STYLE = "grey"
ROW_HEIGHT, BAR_HEIGHT = 40, 13


@dataclass(frozen=True)
class Messages:
    """Messages of a process in a step.

    Attributes:
        axis: of the mesh.
        operator: such as "all_reduce".
        number: of messages.
        bytes: that they carry together.
        seconds: that they take together; None if unknown.
    """

    axis: str
    operator: str
    number: int
    bytes: int
    seconds: float | None = None


def draw_messages(rows: Sequence[Messages], width: int, *, title: str) -> Picture:
    """Return a bar for each axis and operator: its length are the bytes.

    Args:
        rows: from top to bottom.
        width: of the drawing, in pixels.
        title: of the drawing.
    """
    largest = max([row.bytes for row in rows] + [1])
    scale = Scale(0, largest, 0, width)
    body = "".join(_row(row, scale, index * ROW_HEIGHT) for index, row in enumerate(rows))
    description = " ".join(f"{row.axis} {row.operator}: {numbers(row)}." for row in rows) or "There are no messages."
    return Picture(title, description, width, max(1, len(rows)) * ROW_HEIGHT, body)


def _row(row: Messages, scale: Scale, top: float) -> str:
    style = AXIS_STYLES.get(row.axis, OTHER_STYLE)
    name = f"{row.axis}  {row.operator}"
    figures = next(text for text in (numbers(row), shown_value(row.bytes, "bytes"), "") if _fits(name, text, scale.end))
    tip = f"{row.axis} {row.operator}: {numbers(row)}"
    return (
        label(0, top + 13, name)
        + label(scale.end, top + 13, figures, anchor="end", style="muted")
        + box(0, top + 18, scale.end, BAR_HEIGHT, "track", tip=tip)
        + box(0, top + 18, max(1, scale.at(row.bytes)), BAR_HEIGHT, style, tip=tip)
    )


def _fits(name: str, text: str, width: float) -> bool:
    return not text or text_width(name) + text_width(text) + 10 <= width


def numbers(row: Messages) -> str:
    """Return number, bytes and seconds of messages in one line."""
    time = "" if row.seconds is None else f" · {shown_value(row.seconds, 'seconds')}"
    return f"{row.number:,} × · {shown_value(row.bytes, 'bytes')}{time}"
