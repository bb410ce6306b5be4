"""A page: one HTML file that contains its drawings and its style, and loads nothing else.

It needs no script. It follows the reader's choice of light or dark, and fits a phone: a drawing or
table that is wider than the screen scrolls inside its own box.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NewType

from meshtrain.pictures.style import patterns, style_sheet
from meshtrain.pictures.svg import Picture
from meshtrain.pictures.tables import Table

Html = NewType("Html", str)
"""A text that is HTML. Functions that return it have escaped what they were given."""
WIDE, NARROW, CHART = 1060, 328, 350
"""Widths at which drawings are made, in pixels: for a desktop, for a phone, side by side."""
LONG_CELL = 30
"""Number of characters from which a cell of a table may be broken into lines."""
NUMBER = re.compile(r"(-?\d[\d,.]*(e-?\d+)?( ?%| [a-zA-Zµ]+)?)?")
"""A number, which may have a unit, or nothing."""


@dataclass(frozen=True)
class Section:
    """A part of a page, with an entry in the table of contents."""

    title: str
    blocks: tuple[Html, ...]

    @property
    def anchor(self) -> str:
        """Return the name that links use."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") or "section"


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: its heading.
        lead: a sentence below the heading.
        sections: its parts, with different titles.
    """

    title: str
    lead: str
    sections: tuple[Section, ...]

    def html(self) -> str:
        """Return the page as the text of a file."""
        contents = "".join(f'<li><a href="#{part.anchor}">{escape(part.title)}</a></li>' for part in self.sections)
        body = "\n".join(
            f'<section aria-labelledby="{part.anchor}"><h2 id="{part.anchor}">{escape(part.title)}</h2>\n'
            + "\n".join(part.blocks)
            + "</section>"
            for part in self.sections
        )
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>{style_sheet()}</style>\n</head>\n<body>\n{patterns()}\n"
            f'<header><h1>{escape(self.title)}</h1><p class="lead">{escape(self.lead)}</p></header>\n'
            f'<nav aria-label="Contents"><ul>{contents}</ul></nav>\n<main>\n{body}\n</main>\n</body>\n</html>\n'
        )


def paragraph(text: str, *, style: str = "") -> Html:
    """Return a paragraph.

    The style "note" is for remarks, "alarm" for problems, "verdict" for an answer, which may be a
    problem too, and "advice" for what follows from it. Words between backticks are code.
    """
    content = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return Html(f'<p class="{style}">{content}</p>' if style else f"<p>{content}</p>")


def heading(text: str) -> Html:
    """Return a heading inside a section."""
    return Html(f"<h3>{escape(text)}</h3>")


def key_values(pairs: Mapping[str, str], *, alarms: Iterable[str] = ()) -> Html:
    """Return a list of names and values.

    Args:
        pairs: name -> value.
        alarms: names whose value is a problem.
    """
    styles = dict.fromkeys(alarms, "alarm")
    items = "".join(
        f'<div><dt>{escape(name)}</dt><dd class="{styles.get(name, "value")}">{escape(value)}</dd></div>'
        for name, value in pairs.items()
    )
    return Html(f"<dl>{items}</dl>")


def folded_text(title: str, text: str) -> Html:
    """Return a text with its lines as they are, which the reader unfolds."""
    return Html(f"<details><summary>{escape(title)}</summary>{_box(title, f'<pre>{escape(text)}</pre>')}</details>")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """Return a table. Columns of numbers, and numbers with units, are aligned to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    numeric = [
        any(row[index] for row in texts) and all(NUMBER.fullmatch(row[index]) for row in texts)
        for index in range(len(columns))
    ]
    head = "".join(
        f'<th scope="col" class="{"number" if is_number else "text"}">{escape(column)}</th>'
        for column, is_number in zip(columns, numeric, strict=True)
    )
    lines = "".join(f"<tr>{''.join(map(_cell, row, numeric))}</tr>" for row in texts)
    return Html(
        f"<figure><figcaption>{escape(title)}</figcaption>"
        + _box(title, f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>")
        + "</figure>"
    )


def shown_table(found: Table) -> Html:
    """Return a table that the screen shows too."""
    return table(found.title, found.columns, found.rows)


def _cell(text: str, is_number: bool) -> str:
    style = "number" if is_number else "long" if len(text) >= LONG_CELL else ""
    return f'<td class="{style}">{escape(text)}</td>' if style else f"<td>{escape(text)}</td>"


def figure(draw: Callable[[int], Picture], *, note: str = "") -> Html:
    """Return a drawing in a wide and a narrow form; the screen decides which is shown.

    Args:
        draw: takes the width in pixels.
        note: a remark below it.
    """
    wide, narrow = draw(WIDE), draw(NARROW)
    content = f'<div class="wide">{wide.svg()}</div><div class="narrow">{narrow.svg()}</div>'
    return _figure(wide.title, content, note)


def scrolling_figure(picture: Picture, *, note: str = "") -> Html:
    """Return a drawing that keeps its size, and scrolls where the screen is narrower."""
    return _figure(picture.title, _box(picture.title, picture.svg()), note)


def chart_grid(draws: Iterable[Callable[[int], Picture]]) -> Html:
    """Return small drawings side by side, as many as fit the screen."""
    pictures = [draw(CHART) for draw in draws]
    return Html(f'<div class="charts">{"".join(_figure(one.title, one.svg(), "") for one in pictures)}</div>')


def _figure(title: str, content: str, note: str) -> Html:
    remark = f'<p class="note">{escape(note)}</p>' if note else ""
    return Html(f"<figure><figcaption>{escape(title)}</figcaption>{content}{remark}</figure>")


def _box(title: str, content: str) -> str:
    # With `tabindex` it can be scrolled with the keyboard.
    return f'<div class="box" tabindex="0" role="group" aria-label="{escape(title)}">{content}</div>'
