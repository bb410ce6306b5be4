"""The page of a report: one HTML file with charts and tables."""

from collections.abc import Iterator
from functools import partial

from meshtrain.pictures.line_chart import LineChart, draw_line_chart, events_legend
from meshtrain.pictures.message_bars import draw_messages
from meshtrain.pictures.page import (
    Html,
    Page,
    Section,
    chart_grid,
    figure,
    folded_text,
    key_values,
    paragraph,
    scrolling_figure,
    shown_table,
)
from meshtrain.pictures.pipeline_lanes import draw_timelines
from meshtrain.pictures.stacked_bars import draw_stacked_bars
from meshtrain.profiling.report import charts
from meshtrain.profiling.report.comparison import comparison, distinct_ranks, messages_of, peaks_by_pp_rank
from meshtrain.profiling.report.recorded import RecordedRun
from meshtrain.profiling.report.tables import key_figures, tables
from meshtrain.training.files import PLAN_NAME, RUN_NAME

MOST_RANKS = 4
"""Processes whose messages are drawn at most. The table has all of them."""
TIMELINE_NOTE = (
    "Numbers are microbatches. The bubble is the share of the time in which the processes wait for others. Where boxes "
    "would be too narrow, heights are shares of the time."
)

TIME_NOTE = (
    f"A step that takes more than {charts.MOST_TIMES} times as long as a typical one is drawn at the upper edge, such "
    "as the first step after a start."
)


def report_page(run: RecordedRun) -> str:
    """Return the page of a run as HTML, in ASCII."""
    sections = [
        Section("Summary", tuple(_summary(run))),
        Section("Loss", tuple(_loss(run))),
        Section("Optimization", _grid(charts.optimization_charts(run))),
        Section("Speed", tuple(_speed(run))),
        Section("Memory", tuple(_memory(run))),
        Section("Predicted and measured", tuple(_comparison(run))),
        Section("What happened", _tables(run, "Checkpoints", "Starts", "Bad steps")),
        Section("Steps", _tables(run, "Steps")),
        Section("Settings", tuple(_settings(run))),
    ]
    shown = tuple(section for section in sections if section.blocks)
    page = Page(f"Run {run.directory.resolve().name}", _lead(run), shown)
    # A page in ASCII is shown alike whatever encoding a server or a mail program assumes.
    return page.html().encode("ascii", "xmlcharrefreplace").decode()


def _lead(run: RecordedRun) -> str:
    found = key_figures(run)
    model = f" of {found['model']}" if "model" in found else ""
    mesh = f" on {found['mesh']}" if "mesh" in found else ""
    return f"Training{model}{mesh}: {found['steps']} steps."


def _summary(run: RecordedRun) -> Iterator[Html]:
    yield key_values(key_figures(run), alarms=["bad steps"] + ["state"] * (run.failure is not None))
    if run.failure is not None:
        yield paragraph(f"The run failed: {run.failure.sentence()}", style="alarm")


def _loss(run: RecordedRun) -> Iterator[Html]:
    if run.steps:
        chart = charts.loss_chart(run)
        yield figure(partial(draw_line_chart, chart), note=events_legend(chart))
    yield from _tables(run, "Evaluations")


def _grid(found: list[LineChart]) -> tuple[Html, ...]:
    return (chart_grid(partial(draw_line_chart, chart) for chart in found),) if found else ()


def _speed(run: RecordedRun) -> Iterator[Html]:
    yield from _grid(charts.speed_charts(run))
    if run.steps:
        yield paragraph(TIME_NOTE, style="note")
    yield from _bars(run)
    yield from _tables(run, "Time by part")


def _bars(run: RecordedRun) -> Iterator[Html]:
    if run.steps:
        yield figure(partial(draw_stacked_bars, charts.time_bars(run)))


def _tables(run: RecordedRun, *titles: str) -> tuple[Html, ...]:
    return tuple(shown_table(one) for one in tables(run) if one.title.startswith(titles))


def _memory(run: RecordedRun) -> Iterator[Html]:
    if run.prediction is not None and run.prediction.peak_bytes:
        measured = peaks_by_pp_rank(run.summary, run.prediction) if run.summary is not None else {}
        yield figure(partial(draw_stacked_bars, charts.peak_bars(run.prediction, measured)))
    if run.steps:
        yield from _grid([charts.memory_chart(run)])


def _comparison(run: RecordedRun) -> Iterator[Html]:
    prediction, summary = run.prediction, run.summary
    timelines = [
        (name, found.timeline)
        for name, found in (("Predicted", prediction), ("Measured", summary))
        if found is not None and found.timeline.lanes
    ]
    compared = [shown_table(one) for one in comparison(run)]
    if timelines:
        yield scrolling_figure(draw_timelines(timelines, title="Timeline of a step"), note=TIMELINE_NOTE)
    for rank in distinct_ranks(summary)[:MOST_RANKS] if summary is not None else ():
        if rank.messages:
            title = f"Messages of rank {rank.rank} in a step"
            yield figure(partial(draw_messages, messages_of(rank), title=title))
    yield from compared


def _settings(run: RecordedRun) -> Iterator[Html]:
    for name, text in ((RUN_NAME, run.run_text), (PLAN_NAME, run.plan_text)):
        if text:
            yield folded_text(name, text)
