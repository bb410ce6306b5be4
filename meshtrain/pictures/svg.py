"""Pieces of SVG as text. Every text that a user sees is escaped here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]
CHARACTER_WIDTH, STRONG_CHARACTER_WIDTH = 7.3, 8.4
"""Width of a character that is assumed, in pixels: that of a wide font of 12 pixels."""

SAMPLE_WIDTH = 11
"""Width of a colored square in a legend."""


@dataclass(frozen=True)
class Picture:
    """A drawing.

    Attributes:
        title: what it shows, in a few words.
        description: what it shows, for readers who do not see it.
        width: in pixels, at which texts have their intended size.
        height: in pixels.
        body: its content, as SVG.
    """

    title: str
    description: str
    width: float
    height: float
    body: str

    def svg(self) -> str:
        """Return the drawing as an element of a page that contains the style and the patterns."""
        width, height = shown(self.width), shown(self.height)
        return (
            f'<svg role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>{self.body}</svg>"
        )


def shown(coordinate: float) -> str:
    """Return a coordinate with at most one decimal."""
    text = f"{coordinate:.1f}"
    return text.removesuffix(".0")


def box(x: float, y: float, width: float, height: float, style: str, *, tip: str = "") -> str:
    """Return a rectangle.

    Args:
        style: classes of the style sheet.
        tip: shown when the pointer is over it.
    """
    place = f'x="{shown(x)}" y="{shown(y)}" width="{shown(width)}" height="{shown(height)}"'
    return f'<rect class="{style}" {place}{_closed("rect", tip)}'


def label(x: float, y: float, text: str, *, anchor: Anchor = "start", style: str = "") -> str:
    """Return a text whose baseline begins, is centered or ends at a point."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    classes = f' class="{style}"' if style else ""
    return f'<text x="{shown(x)}" y="{shown(y)}"{where}{classes}>{escape(text)}</text>'


def line(x: float, y: float, to_x: float, to_y: float, style: str) -> str:
    """Return a straight line."""
    return f'<line class="{style}" x1="{shown(x)}" y1="{shown(y)}" x2="{shown(to_x)}" y2="{shown(to_y)}"/>'


def path(commands: str, style: str, *, tip: str = "") -> str:
    """Return a path."""
    return f'<path class="{style}" d="{commands}"{_closed("path", tip)}'


def dot(x: float, y: float, radius: float, style: str, *, tip: str = "") -> str:
    """Return a filled circle."""
    return f'<circle class="{style}" cx="{shown(x)}" cy="{shown(y)}" r="{shown(radius)}"{_closed("circle", tip)}'


def _closed(tag: str, tip: str) -> str:
    return f"><title>{escape(tip)}</title></{tag}>" if tip else "/>"


def text_width(text: str, *, strong: bool = False) -> float:
    """Return the width that a text needs in any font, in pixels.

    Args:
        strong: whether the text has the style "strong".
    """
    return (STRONG_CHARACTER_WIDTH if strong else CHARACTER_WIDTH) * len(text)


def shortened(text: str, width: float) -> str:
    """Return the beginning of a text that fits a width; an empty text if nothing fits."""
    fitting = int(width / CHARACTER_WIDTH)
    if len(text) <= fitting:
        return text
    return f"{text[: fitting - 1].rstrip()}…" if fitting > 1 else ""


def wrapped(text: str, width: float) -> list[str]:
    """Return a text as lines that fit a width. A word that does not fit is shortened."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(shortened(word, width))
    return lines


def square(x: float, y: float, style: str) -> str:
    """Return the sample of an area for a legend."""
    return box(x, y - 5, SAMPLE_WIDTH, 11, style)


def legend(
    entries: Iterable[tuple[str, str]],
    width: float,
    top: float,
    *,
    sample: Callable[[float, float, str], str] = square,
    sample_width: float = SAMPLE_WIDTH,
) -> tuple[str, float]:
    """Return rows of samples with their names, and the height of the rows.

    Args:
        entries: style of the sample, and name.
        width: the most pixels of a row.
        top: of the first row.
        sample: draws a sample, from its left end, its middle and its style.
        sample_width: of a sample.
    """
    row_height, gap = 18, 14
    drawn, x, y = [], 0.0, top
    for style, name in entries:
        needed = sample_width + 5 + text_width(name)
        if x and x + needed > width:
            x, y = 0.0, y + row_height
        drawn.append(sample(x, y + 7.5, style) + label(x + sample_width + 5, y + 12, name))
        x += needed + gap
    return "".join(drawn), (y - top + row_height if drawn else 0.0)
