"""What is drawn: parts, sizes, marks, tips and descriptions."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import partial

import pytest

from meshtrain.pictures.line_chart import Event, LineChart, Series, draw_line_chart, events_legend
from meshtrain.pictures.memory import MemoryBar, MemoryCurve, Moment, draw_memory_bars, draw_memory_curve
from meshtrain.pictures.mesh_grid import MeshGrid, draw_mesh
from meshtrain.pictures.message_bars import Messages, draw_messages
from meshtrain.pictures.pipeline_lanes import draw_timelines
from meshtrain.pictures.stacked_bars import Bar, StackedBars
from meshtrain.pictures.svg import Picture
from meshtrain.pictures.timeline import Lane, Span, Timeline, bubble
from tests.pictures.examples import GIB, LARGE_MESH, MESH, MESSAGES, losses, memory_bars, memory_curve, pipeline

SVG = "{http://www.w3.org/2000/svg}"


def parsed(picture: Picture) -> ElementTree.Element:
    """Return the drawing as XML, which is valid only if every text is escaped."""
    return ElementTree.fromstring(picture.svg().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def texts(picture: Picture) -> list[str]:
    return [text.text or "" for text in parsed(picture).iter(f"{SVG}text")]


def tips(picture: Picture) -> list[str]:
    root = parsed(picture)
    return [tip.text or "" for tip in root.iter(f"{SVG}title") if tip not in list(root)]


def boxes(picture: Picture, style: str) -> Iterator[dict[str, float]]:
    """Yield the places of the boxes of a style that have tips, so not those of the legend."""
    for one in parsed(picture).iter(f"{SVG}rect"):
        if style in one.attrib["class"].split() and len(one):
            yield {name: float(one.attrib[name]) for name in ("x", "y", "width", "height")}


@pytest.mark.parametrize(
    "picture",
    [
        draw_mesh(MESH, 1060),
        draw_memory_bars(memory_bars(2), 328, limit_bytes=None, title="Memory & more"),
        draw_memory_curve(memory_curve(10), 1060),
        draw_timelines([("Predicted <b>", pipeline(2, 2))], title="Step <b>"),
        draw_messages(MESSAGES, 328, title="Messages"),
        draw_line_chart(losses(10), 350),
    ],
    ids=lambda picture: picture.title,
)
def test_every_drawing_is_valid_and_described(picture: Picture) -> None:
    root = parsed(picture)
    assert root.attrib["role"] == "img"
    title, description = list(root)[:2]
    assert (title.tag, title.text) == (f"{SVG}title", picture.title)
    assert description.tag == f"{SVG}desc"
    assert description.text


def test_mesh_has_a_cell_for_each_process() -> None:
    picture = draw_mesh(MESH, 1060)
    assert picture.title == "The mesh: pp 2 x dp_shard 2 x tp 2 = 8 processes"
    assert [text for text in texts(picture) if text.isdigit()] == [str(rank) for rank in range(8)]
    assert "rank 5: pp 1, dp_replicate 0, dp_shard 0, tp 1. stage 1: layers 12-23, final norm, head and loss" in tips(
        picture
    )
    assert {"pp 0: ranks 0-3", "pp 1: ranks 4-7", "stage 0: embedding, layers 0-11"} <= set(texts(picture))


def test_large_mesh_shows_equal_processes_once() -> None:
    picture = draw_mesh(LARGE_MESH, 1060)
    assert picture.title.endswith("= 2,048 processes")
    assert [text for text in texts(picture) if text.isdigit()][8:16] == [str(rank) for rank in range(128, 136)]
    assert texts(picture).count("× 16  (dp_replicate 4 x dp_shard 4)") == 16
    narrow = texts(draw_mesh(LARGE_MESH, 328))
    assert narrow.count("tp 0-7") == narrow.count("× 16") == 16


@pytest.mark.parametrize("pp", [1, 2, 16, 256, 2048])
@pytest.mark.parametrize("tp", [1, 8, 64])
def test_any_mesh_is_small_and_counts_all_processes(pp: int, tp: int) -> None:
    mesh = MeshGrid(tuple(f"stage {stage}" for stage in range(pp)), (("dp_shard", 2048 // pp), ("tp", tp)))
    for width in (328, 1060):
        picture = draw_mesh(mesh, width)
        assert len(picture.svg()) < 200_000
        assert picture.height < 4_100
        assert f"= {2048 * tp:,} processes" in picture.title
    assert (f"… {pp - 48:,} more pp ranks" in texts(picture)) == (pp > 48)


def test_memory_bars_are_to_scale_and_in_order() -> None:
    sizes = {"optimizer": 24 * GIB, "parameters": 12 * GIB, "gathered": 6 * GIB}
    bar = MemoryBar("rank 0", sizes, "backward of microbatch 3")
    picture = draw_memory_bars([bar], 1060, limit_bytes=30 * GIB, title="Memory")
    (parameters,), (gathered,), (optimizer,) = (boxes(picture, style) for style in ("blue", "blue-hatch", "green"))
    assert parameters["x"] < gathered["x"] < optimizer["x"]
    assert parameters["width"] == pytest.approx(2 * gathered["width"], rel=0.01)
    assert optimizer["width"] == pytest.approx(2 * parameters["width"], rel=0.01)
    assert optimizer["x"] == pytest.approx(gathered["x"] + gathered["width"], abs=0.2)
    assert "rank 0: parameters 12 GiB, backward of microbatch 3" in tips(picture)
    assert {"42 GiB", "limit 30 GiB", "optimizer 24 GiB"} <= set(texts(picture))
    # The part above the limit has a frame.
    (over,) = (one.attrib for one in parsed(picture).iter(f"{SVG}rect") if one.attrib["class"] == "over")
    assert float(over["width"]) == pytest.approx(2 * gathered["width"], rel=0.01)
    assert picture.description.startswith("The limit is 30 GiB. rank 0: 42 GiB, of which parameters 12 GiB, gathered")


def test_part_without_a_style_is_refused() -> None:
    with pytest.raises(ValueError, match="Memory: parts without a style: cache"):
        StackedBars("Memory", (Bar("rank 0", {"cache": 1.0}),), {"parameters": "blue"}, "bytes")


def test_memory_curve_marks_the_first_highest_moment() -> None:
    moments = [Moment(0, "start", {"parameters": GIB}), Moment(1, "forward", {"parameters": GIB, "activations": GIB})]
    moments += [Moment(2, "backward", {"parameters": GIB, "activations": GIB}), Moment(3, "end", {"parameters": 1})]
    curve = MemoryCurve("rank 0", tuple(moments), 4, "actions", 4 * GIB)
    picture = draw_memory_curve(curve, 1060)
    assert "Peak 2 GiB: forward" in texts(picture)
    assert picture.description == (
        "The peak is at forward: 2 GiB, parameters 1 GiB, activations 1 GiB. The limit is 4 GiB."
    )
    (peak,) = parsed(picture).iter(f"{SVG}circle")
    (blue, vermillion) = (
        one.attrib["d"] for one in parsed(picture).iter(f"{SVG}path") if one.attrib["class"] in ("blue", "vermillion")
    )
    assert f" {peak.attrib['cy']}H" in vermillion
    assert blue.count("H") == vermillion.count("H") == 8


def test_many_moments_stay_small() -> None:
    moments = memory_curve(100_000)
    picture = draw_memory_curve(moments, 1060)
    assert len(picture.svg()) < 400_000
    assert "Peak 82 GiB" in " ".join(texts(picture))


def test_timeline_has_boxes_with_microbatches() -> None:
    timeline = pipeline(2, 3)
    picture = draw_timelines([("Predicted", timeline)], title="The step")
    numbers = [text.text for text in parsed(picture).iter(f"{SVG}text") if text.get("class") == "on-blue small"]
    assert numbers == ["0", "1", "2"] * 2
    assert len([*boxes(picture, "blue")]) == len([*boxes(picture, "green")]) == 6
    assert "forward of microbatch 1, stage 0: 10 ms, begins at 11 ms" in tips(picture)
    assert {"forward", "input gradient", "weight gradient", "send", "gradients", "optimizer"} <= set(texts(picture))
    assert "backward" not in texts(picture)


def test_bubble_is_the_share_of_the_time_that_processes_wait() -> None:
    lanes = (
        Lane("rank 0", (Span("forward", 1, 2, 0, 0), Span("wait", 2, 3), Span("backward", 3, 5, 0, 0))),
        Lane("rank 1", (Span("forward", 2, 3, 1, 0), Span("optimizer", 5, 9))),
    )
    assert bubble(Timeline(lanes)) == pytest.approx(1 - (3 + 5) / 18)
    assert "Step: 9 s, bubble 55.6%" in texts(draw_timelines([("Step", Timeline(lanes))], title="Step"))
    assert bubble(Timeline(())) == bubble(Timeline(lanes[:1])) == 0
    assert "alone: 5 s" in texts(draw_timelines([("alone", Timeline(lanes[:1]))], title="Step"))


def test_two_timelines_have_one_scale() -> None:
    picture = draw_timelines([("Predicted", pipeline(1, 1)), ("Measured", pipeline(1, 1, unit=0.02))], title="Step")
    predicted, measured = boxes(picture, "blue")
    assert measured["width"] == pytest.approx(2 * predicted["width"], rel=0.01)
    assert measured["y"] > predicted["y"] + predicted["height"]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(16, 512), (64, 512), (16, 64)])
def test_large_timelines_are_small(num_ranks: int, num_microbatches: int) -> None:
    picture = draw_timelines([("Step", pipeline(num_ranks, num_microbatches))], title="Step")
    assert len(picture.svg()) < 1_000_000


def test_merged_columns_show_the_shares_of_time() -> None:
    spans = [
        Span(kind, (4 * i + at) * 1e-6, (4 * i + at + 1) * 1e-6, 0, i)
        for i in range(10_000)
        for kind, at in (("forward", 0), ("backward", 1))
    ]
    picture = draw_timelines([("Step", Timeline((Lane("rank 0", tuple(spans)),)))], title="Step")
    areas = {one.attrib["class"]: one.attrib["d"] for one in parsed(picture).iter(f"{SVG}path")}
    heights = {style: {abs(int(part)) for part in re.findall(r"v(-?\d+)", path)} for style, path in areas.items()}
    # A quarter of the lane is forward, a quarter backward, the rest is idle.
    assert set.union(*heights.values()) <= {4, 5, 6, 7}


def test_messages_are_to_scale() -> None:
    rows = (Messages("tp", "all_reduce", 12, 4 * GIB, 0.05), Messages("other", "send", 1, GIB))
    picture = draw_messages(rows, 1060, title="Messages")
    (reduced,), (sent,) = boxes(picture, "vermillion"), boxes(picture, "grey")
    assert reduced["width"] == pytest.approx(4 * sent["width"])
    assert {"tp  all_reduce", "12 × · 4 GiB · 50 ms", "1 × · 1 GiB"} <= set(texts(picture))
    assert draw_messages((), 328, title="Messages").description == "There are no messages."


def lines_of(picture: Picture, index: int) -> list[list[tuple[float, float]]]:
    found = (one for one in parsed(picture).iter(f"{SVG}polyline") if f"line{index}" in one.attrib["class"])
    return [[tuple(map(float, point.split(","))) for point in one.attrib["points"].split()] for one in found]


def test_values_that_are_missing_make_gaps() -> None:
    values = [1.0, 2.0, None, 4.0, float("nan"), float("inf"), 3.0, 2.0]
    picture = draw_line_chart(LineChart("Loss", (Series("loss", tuple(enumerate(values))),)), 1060)
    first, last = lines_of(picture, 0)
    assert (len(first), len(last)) == (2, 2)
    assert len([*parsed(picture).iter(f"{SVG}circle")]) == 2, "a value alone, and the last value"
    assert "step 2: loss no value" in tips(picture)
    assert first[0][1] > first[1][1], "larger values are higher"
    assert "2" in texts(picture), "the last value"


def test_logarithmic_axis_has_equal_lengths_for_equal_ratios() -> None:
    points = tuple(enumerate((1.0, 10.0, 100.0, 0.0)))
    picture = draw_line_chart(LineChart("Loss", (Series("loss", points),), "nats", is_log=True), 1060)
    ((low, middle, high),) = lines_of(picture, 0)
    assert low[1] - middle[1] == pytest.approx(middle[1] - high[1], abs=0.2)
    assert {"1", "10", "100", "nats, logarithmic"} <= set(texts(picture))


def test_events_have_marks() -> None:
    events = tuple(
        Event(step, kind, f"{kind} {step}") for step, kind in ((2, "checkpoint"), (3, "restart"), (4, "bad step"))
    )
    chart = LineChart("Loss", (Series("loss", tuple((step, 1.0) for step in range(6))),), events=events)
    picture = draw_line_chart(chart, 350)
    assert {"checkpoint 2", "restart 3", "bad step 4"} <= set(tips(picture))
    assert events_legend(chart) == "Triangle on the axis: checkpoint; flag: the run started again; cross: bad step."
    beyond = LineChart("Loss", chart.series, events=(Event(99, "checkpoint", "later"),))
    assert "later" not in tips(draw_line_chart(beyond, 350))


def test_many_steps_keep_their_extremes_and_stay_small() -> None:
    points = [(step, 1.0) for step in range(100_000)]
    points[50_123] = (50_123, 9.0)
    picture = draw_line_chart(LineChart("Loss", (Series("loss", tuple(points)),)), 1060)
    ((*drawn,),) = lines_of(picture, 0)
    assert len(drawn) < 5_000
    assert len(picture.svg()) < 100_000
    assert min(y for _, y in drawn) < 40, "the outlier"


def test_charts_without_values_say_so() -> None:
    draw = partial(draw_line_chart, width=350)
    assert texts(draw(LineChart("Loss", ()))) == ["no values"]
    with pytest.raises(ValueError, match="Loss: a chart has at most 12 lines, not 13"):
        draw(LineChart("Loss", (Series("a", ()),) * 13))
