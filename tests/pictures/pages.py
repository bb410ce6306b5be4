"""A page with every kind of drawing and with texts that try to break it."""

from functools import partial

from meshtrain.pictures.line_chart import LineChart, Series, draw_line_chart, events_legend
from meshtrain.pictures.memory import draw_memory_bars, draw_memory_curve
from meshtrain.pictures.mesh_grid import MeshGrid, draw_mesh
from meshtrain.pictures.message_bars import draw_messages
from meshtrain.pictures.page import (
    Page,
    Section,
    chart_grid,
    figure,
    heading,
    key_values,
    paragraph,
    scrolling_figure,
    table,
)
from meshtrain.pictures.pipeline_lanes import draw_timelines
from tests.pictures.examples import (
    GIB,
    LARGE_MESH,
    MESH,
    MESSAGES,
    losses,
    memory_bars,
    memory_curve,
    pipeline,
)

HOSTILE = """<script>alert("1")</script> & 'x' <b>"""
ALONE = MeshGrid(("everything",), (("dp_shard", 1), ("tp", 1)))
RATE = LineChart("Learning rate", (Series("learning rate", tuple((step, 3e-6 * step) for step in range(100))),))
ONE = LineChart("One value", (Series("loss", ((3, 0.5),)),), quantity="seconds")
NONE = LineChart("No value", (Series("loss", ((3, None),)),))


def page() -> Page:
    """Return the page."""
    step = [("Predicted", pipeline(4, 8)), ("Measured", pipeline(4, 8, unit=0.0115))]
    bars = partial(draw_memory_bars, memory_bars(4), limit_bytes=80 * GIB, title="Memory at the peak")
    return Page(
        "Every drawing",
        f"A lead {HOSTILE}",
        (
            Section("Mesh", tuple(figure(partial(draw_mesh, mesh)) for mesh in (MESH, LARGE_MESH, ALONE))),
            Section(
                "Memory", (figure(bars), *(figure(partial(draw_memory_curve, memory_curve(n))) for n in (12, 400)))
            ),
            Section("Timeline", (scrolling_figure(draw_timelines(step, title="The step")), paragraph(HOSTILE))),
            Section("Messages", (figure(partial(draw_messages, MESSAGES, title="Messages of a process")),)),
            Section(
                "Lines",
                (
                    figure(partial(draw_line_chart, losses(1000)), note=events_legend(losses(1000))),
                    chart_grid(partial(draw_line_chart, chart) for chart in (losses(50, is_log=True), RATE, ONE, NONE)),
                ),
            ),
            Section(
                f"Tables {HOSTILE}",
                (
                    heading(HOSTILE),
                    table(HOSTILE, ["name", "number", HOSTILE], [("a", "1,000", HOSTILE * 3), ("b", "2", "")]),
                    key_values(
                        {"machine": "one with a name of many words and letters", HOSTILE: HOSTILE}, alarms=["a"]
                    ),
                ),
            ),
        ),
    )
