"""The page of a plan: one HTML file with drawings and tables."""

from collections.abc import Iterator
from functools import partial

from meshtrain.config.toml import dump_toml
from meshtrain.pictures.memory import draw_memory_bars, draw_memory_curve
from meshtrain.pictures.mesh_grid import draw_mesh
from meshtrain.pictures.message_bars import draw_messages
from meshtrain.pictures.page import (
    Html,
    Page,
    Section,
    figure,
    folded_text,
    key_values,
    paragraph,
    scrolling_figure,
    shown_table,
)
from meshtrain.pictures.pipeline_lanes import draw_timelines
from meshtrain.pictures.stacked_bars import draw_stacked_bars
from meshtrain.planning.names import ranks_named
from meshtrain.planning.page.constants import constants_table
from meshtrain.planning.page.curve import PARTS
from meshtrain.planning.page.memory import limit_bytes, memory_bars, worst_curve
from meshtrain.planning.page.mesh import mesh_grid
from meshtrain.planning.page.time import message_seconds, most_messages
from meshtrain.planning.remarks import (
    compilation_remark,
    documents_remark,
    estimates_remark,
    host_remark,
    time_remark,
)
from meshtrain.planning.sizing import Sizing
from meshtrain.planning.tables import axes_table, memory_table, messages_table, work_table
from meshtrain.training.report import batch_equation, border_tables, plan_table, shares_table

MEMORY_TITLE = "Memory of a process at its peak"
MEMORY_NOTE = (
    "Gathered: full parameters while they are used. Unreduced: gradients that are kept until the last microbatch. "
    "Reserved: in use besides tensors. Fragmentation: held by torch's allocator in unusable pieces."
)
CURVE_NOTE = f"Tensors only: the fullest moment of each of {PARTS} equal parts of the step."
TIMELINE_NOTE = (
    "Numbers are microbatches. The bubble is the share of the time in which pp ranks wait for others. Where boxes "
    "would be too narrow, heights are shares of the time."
)
SECONDS_NOTE = "Of the pp rank where they cost most. Exposed: the process does nothing else meanwhile."


def plan_page(sizing: Sizing) -> str:
    """Return the page of a plan as HTML, in ASCII."""
    sections = (
        Section("Summary", tuple(_summary(sizing))),
        Section("Mesh", tuple(_mesh(sizing))),
        Section("Memory", tuple(_memory(sizing))),
        Section("Time", tuple(_time(sizing))),
        Section("Messages and work", tuple(_messages(sizing))),
        Section("Plan", tuple(_plan(sizing))),
        Section("Machine", tuple(_machine(sizing))),
    )
    number, mesh = sizing.resolved.plan.mesh.world_size, sizing.resolved.plan.mesh.described()
    processes = "1 process" if number == 1 else f"{number:,} processes"
    lead = f"What a step of {type(sizing.resolved.model).__name__} needs on {mesh}, simulated before a launch."
    shown = tuple(section for section in sections if section.blocks)
    page = Page(f"{sizing.name}: {processes} on {sizing.machine.name}", lead, shown)
    # A page in ASCII is shown alike whatever encoding a server or a mail program assumes.
    return page.html().encode("ascii", "xmlcharrefreplace").decode()


def _summary(sizing: Sizing) -> Iterator[Html]:
    fits = sizing.verdict.fits
    yield paragraph(sizing.verdict.sentence, style="verdict" if fits else "verdict alarm")
    if sizing.advice:
        yield paragraph(sizing.advice, style="advice")
    yield key_values(sizing.key_figures(), alarms=[] if fits else ["fits"])
    if sizing.needs.time is None:
        yield paragraph(time_remark(sizing.needs, sizing.machine))
    remarks = (
        sizing.verdict.besides,
        estimates_remark(sizing.machine),
        documents_remark(sizing.resolved),
        compilation_remark(sizing.resolved),
    )
    yield from _notes(*remarks)


def _notes(*texts: str) -> Iterator[Html]:
    return (paragraph(text, style="note") for text in texts if text)


def _mesh(sizing: Sizing) -> Iterator[Html]:
    yield figure(partial(draw_mesh, mesh_grid(sizing.resolved.plan.mesh, sizing.shares)))


def _memory(sizing: Sizing) -> Iterator[Html]:
    bars, limit = memory_bars(sizing), limit_bytes(sizing)
    yield figure(partial(draw_memory_bars, bars, limit_bytes=limit, title=MEMORY_TITLE), note=MEMORY_NOTE)
    yield figure(partial(draw_memory_curve, worst_curve(sizing)), note=CURVE_NOTE)
    yield shown_table(memory_table(sizing.needs))
    yield from _notes(host_remark(sizing.needs))


def _time(sizing: Sizing) -> Iterator[Html]:
    if sizing.needs.time is not None:
        yield paragraph(time_remark(sizing.needs, sizing.machine))
        timeline = sizing.needs.time.replay.timeline
        yield scrolling_figure(
            draw_timelines([("Predicted", timeline)], title="Timeline of a step"), note=TIMELINE_NOTE
        )


def _messages(sizing: Sizing) -> Iterator[Html]:
    needs = sizing.needs
    if needs.time is not None and needs.time.replay.axes:
        yield figure(partial(draw_stacked_bars, message_seconds(needs.time)), note=SECONDS_NOTE)
        yield shown_table(axes_table(needs.time))
    group, rows = most_messages(needs)
    if rows:
        title = f"Messages of {ranks_named(needs.ranks(group))} in a step"
        yield figure(partial(draw_messages, rows, title=title))
        yield shown_table(messages_table(needs))
    yield shown_table(work_table(needs))


def _plan(sizing: Sizing) -> Iterator[Html]:
    tables = plan_table(sizing.resolved), shares_table(sizing.shares), *border_tables(sizing.resolved)
    for table in tables:
        yield shown_table(table)
    yield paragraph(batch_equation(sizing.resolved), style="note")
    yield folded_text("The resolved plan as a file", dump_toml(sizing.resolved.plan))


def _machine(sizing: Sizing) -> Iterator[Html]:
    yield paragraph(f"Source: {sizing.machine.config.source}.")
    yield shown_table(constants_table(sizing.machine))
