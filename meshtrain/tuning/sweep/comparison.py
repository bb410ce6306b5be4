"""The comparison of the runs of a sweep: a table, the best run, and a page."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from meshtrain.config.problems import shortened
from meshtrain.config.reading import shown_path
from meshtrain.pictures.colors import MOST_LINES
from meshtrain.pictures.line_chart import LineChart, Series, draw_line_chart
from meshtrain.pictures.page import Html, Page, Section, figure, folded_text, paragraph, shown_table
from meshtrain.pictures.tables import Table
from meshtrain.profiling.report.charts import series
from meshtrain.profiling.report.figures import last_step, numbers, peak_memory, typical
from meshtrain.profiling.report.recorded import RecordedRun
from meshtrain.profiling.report.tables import shown
from meshtrain.tuning.sweep.outcome import Outcome

ROOM = 1.2
"""End of the axis of losses, as a multiple of the highest loss at the beginning."""
LONGEST_REASON = 240
COLUMNS = ("state", "steps", "evaluation loss", "lowest evaluation loss", "training loss", "tokens/s", "peak memory")


def comparison_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a row for each run: its values of the keys that differ, and what it has reached."""
    keys = tuple(outcomes[0].run.combination.differing)
    rows = tuple((*one.run.combination.differing.values(), one.state, *_numbers(one.recorded)) for one in outcomes)
    return Table("Runs", (*keys, *COLUMNS), rows).without_empty_columns()


def _numbers(run: RecordedRun | None) -> tuple[str, ...]:
    if run is None:
        return ("",) * (len(COLUMNS) - 1)
    evaluated, trained = numbers(run.evaluations, "eval_loss"), numbers(run.steps, "loss")
    return (
        f"{last_step(run):,}",
        _loss(evaluated[-1:]),
        _loss([min(evaluated)] if evaluated else []),
        _loss(trained[-1:]),
        shown(typical(run, "tokens_per_second")),
        shown(peak_memory(run), "bytes"),
    )


def _loss(values: Sequence[float]) -> str:
    return f"{values[0]:.4f}" if values else ""


def best(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the finished run with the lowest loss at the end; None if none is done."""
    done = [one for one in outcomes if one.state == "done" and one.loss is not None]
    return min(done, key=lambda one: one.loss or 0.0, default=None)


def sentences(outcomes: Sequence[Outcome]) -> list[str]:
    """Return which run is the best, and why runs have failed, a line each."""
    lines = []
    if (winner := best(outcomes)) is not None and winner.recorded is not None:
        kind = "evaluation" if winner.recorded.evaluations else "training"
        lines.append(f"Lowest {kind} loss at the end: {winner.loss:.4f}, {winner.run.name}")
    failed = [one for one in outcomes if one.state == "failed"]
    return lines + [f"Failed: {one.run.name}: {shortened(one.reason(), LONGEST_REASON)}" for one in failed]


def sweep_page(outcomes: Sequence[Outcome]) -> str:
    """Return the page of a sweep as HTML, in ASCII."""
    sections = [
        Section("Comparison", tuple(_comparison(outcomes))),
        Section("Training loss", tuple(_chart(outcomes, "Training loss", "loss"))),
        Section("Evaluation loss", tuple(_chart(outcomes, "Evaluation loss", "eval_loss"))),
        Section("Run files", tuple(folded_text(one.run.file.name, one.run.file.read_text()) for one in outcomes)),
    ]
    directory = outcomes[0].run.directory.parent
    done = sum(one.state == "done" for one in outcomes)
    lead = f"{len(outcomes)} runs in {shown_path(directory)}, {done} of them done."
    page = Page(f"Sweep {directory.name}", lead, tuple(section for section in sections if section.blocks))
    return page.html().encode("ascii", "xmlcharrefreplace").decode()


def _comparison(outcomes: Sequence[Outcome]) -> Iterator[Html]:
    for sentence in sentences(outcomes):
        yield paragraph(sentence, style="alarm" if sentence.startswith("Failed") else "verdict")
    yield shown_table(comparison_table(outcomes))


def _chart(outcomes: Sequence[Outcome], title: str, key: str) -> Iterator[Html]:
    """Draw a loss of all runs; of the best ones if these are too many."""
    lines = {one.run.name: _line(one, key) for one in outcomes}
    drawn = [one for one in outcomes if _finite(lines[one.run.name])]
    notes = []
    if len(drawn) > MOST_LINES:
        best_first = sorted(drawn, key=lambda one: math.inf if one.loss is None else one.loss)
        chosen = {one.run.name for one in best_first[:MOST_LINES]}
        drawn = [one for one in drawn if one.run.name in chosen]
        notes.append(f"The {MOST_LINES} runs with the lowest loss; the table has all.")
    if not drawn:
        return
    curves = tuple(lines[one.run.name] for one in drawn)
    values = [_finite(curve) for curve in curves]
    # Otherwise all that can be seen is the run that has diverged.
    most: float | None = ROOM * max(first for first, *_ in values)
    if most is not None and max(map(max, values)) > most:
        notes.append("A loss far above that of the beginning is drawn at the upper edge.")
    else:
        most = None
    chart = LineChart(title, curves, unit="nats per token", most=most)
    yield figure(partial(draw_line_chart, chart), note=" ".join(notes))


def _line(outcome: Outcome, key: str) -> Series:
    rows = () if outcome.recorded is None else outcome.recorded.metrics
    return series(outcome.run.name, rows, key)


def _finite(line: Series) -> list[float]:
    """Return the finite values of a line."""
    return [value for _, value in line.points if value is not None and math.isfinite(value)]
