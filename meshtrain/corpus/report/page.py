"""The page of a report: one HTML file that contains its charts and loads nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from meshtrain.console import BYTES_PER_MB
from meshtrain.corpus.steps.step import Counts
from meshtrain.data.cache import write_atomically

CHART_WIDTH = 900
LABEL_WIDTH = 170
NUMBER_WIDTH = 110
BAR_HEIGHT = 22
BAR_GAP = 8
KEPT_COLOR = "#4878a8"
DROPPED_COLORS = ("#c0504d", "#e08e45", "#d8b94a", "#8064a2", "#7f7f7f", "#4f9d90", "#a5678e")
SHOWN_CHARACTERS = 600

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } th, td { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top }
td.number, th.number { text-align: right } th { border-bottom: 1px solid #999 }
pre { white-space: pre-wrap; background: #f4f4f4; padding: .5rem; margin: .2rem 0; max-height: 9rem; overflow: auto }
svg text { font-size: 13px } code { overflow-wrap: anywhere }
"""


@dataclass(frozen=True)
class Example:
    """A dropped document."""

    name: str
    """The link of the document, or its id if it has no link."""
    text: str
    detail: str


@dataclass(frozen=True)
class StepReport:
    """The counts of a complete step, and examples of dropped documents."""

    name: str
    counts: Counts
    examples: dict[str, list[Example]] = field(default_factory=dict)
    """Dropped documents by reason."""


def write_page(path: Path, title: str, steps: Sequence[StepReport]) -> None:
    """Write the page of a report."""
    sections = [
        "<h2>Documents after each step</h2>",
        _remaining(steps),
        "<h2>Why documents were dropped</h2>",
        _drop_reasons(steps) or "<p>No document was dropped.</p>",
        "<h2>Counts</h2>",
        _table(steps),
        "<h2>Examples of what was dropped</h2>",
        *(_examples(step) for step in steps),
    ]
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    body = "\n".join(sections)
    write_atomically(path, f"{head}<style>{STYLE}</style>\n<h1>Corpus {escape(title)}</h1>\n{body}\n</html>\n")


def _remaining(steps: Sequence[StepReport]) -> str:
    rows = [("(at the start)", steps[0].counts.entered), *((step.name, step.counts.kept) for step in steps)]
    return _bars([(name, number, KEPT_COLOR) for name, number in rows])


def _drop_reasons(steps: Sequence[StepReport]) -> str:
    rows = []
    for position, step in enumerate(steps):
        color = DROPPED_COLORS[position % len(DROPPED_COLORS)]
        rows += [(f"{step.name}: {reason}", number, color) for reason, number in step.counts.dropped.items()]
    return _bars(rows) if rows else ""


def _bars(rows: Sequence[tuple[str, int, str]]) -> str:
    """Draw a horizontal bar for each name, number and color."""
    longest = max(number for _, number, _ in rows) or 1
    most_width = CHART_WIDTH - LABEL_WIDTH - NUMBER_WIDTH
    drawn = []
    for position, (name, number, color) in enumerate(rows):
        top = position * (BAR_HEIGHT + BAR_GAP)
        width = most_width * number / longest
        middle = top + BAR_HEIGHT * 0.7
        drawn.append(
            f'<text x="{LABEL_WIDTH - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{LABEL_WIDTH}" y="{top}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{color}"/>'
            f'<text x="{LABEL_WIDTH + width + 6:.1f}" y="{middle:.1f}">{number:,}</text>'
        )
    height = len(rows) * (BAR_HEIGHT + BAR_GAP)
    return f'<svg viewBox="0 0 {CHART_WIDTH} {height}" width="100%" role="img">{"".join(drawn)}</svg>'


def _table(steps: Sequence[StepReport]) -> str:
    head = ("step", "in", "out", "dropped", "MB out", "documents/s")
    rows = []
    for step in steps:
        counts = step.counts
        numbers = (counts.entered, counts.kept, sum(counts.dropped.values()), round(counts.num_bytes / BYTES_PER_MB, 1))
        rows.append((step.name, *(f"{number:,}" for number in numbers), f"{counts.documents_per_second:,.0f}"))
        rows += [
            (f"&nbsp;&nbsp;{escape(part)}", "", f"{number:,}", "", "", "") for part, number in counts.parts.items()
        ]
        rows += [
            (f"&nbsp;&nbsp;{escape(reason)}", "", "", f"{number:,}", "", "")
            for reason, number in counts.dropped.items()
        ]
    lines = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{_cells('th', head)}</tr>{lines}</table>"


def _cells(tag: str, row: Iterable[str]) -> str:
    first, *numbers = row
    return f"<{tag}>{first}</{tag}>" + "".join(f'<{tag} class="number">{number}</{tag}>' for number in numbers)


def _examples(step: StepReport) -> str:
    parts = []
    for reason, number in step.counts.dropped.items():
        parts.append(f"<h3>{escape(step.name)}: {escape(reason)} ({number:,})</h3>")
        for example in step.examples[reason]:
            detail = f" &mdash; {escape(example.detail)}" if example.detail else ""
            text = f"<pre>{escape(example.text[:SHOWN_CHARACTERS])}</pre>" if example.text else ""
            parts.append(f"<p><code>{escape(example.name)}</code>{detail}</p>{text}")
    return "\n".join(parts)
