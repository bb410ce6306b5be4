"""Pages in a real browser: nothing overflows, texts can be read, sizes are right, dark is dark."""

from pathlib import Path

import pytest

from meshtrain.pictures.colors import GROUNDS
from meshtrain.pictures.memory import draw_memory_bars
from meshtrain.pictures.page import Html, Page, Section, figure
from meshtrain.pictures.svg import Picture, label
from tests.pictures.browser import FONT_SIZES, OVERFLOW, TEXTS, measure, screenshot
from tests.pictures.examples import GIB, memory_bars
from tests.pictures.pages import page

PHONE, DESKTOP = 360, 1280
BARS = """
return [...page.querySelectorAll(".wide rect.blue.cell")].map(bar => bar.getBoundingClientRect().width)"""


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_nothing_is_wider_than_the_screen(width: int, tmp_path: Path) -> None:
    assert measure(page().html(), OVERFLOW, tmp_path, width=width) == [width, []]


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_texts_are_whole_large_enough_and_apart(width: int, tmp_path: Path) -> None:
    html = page().html()
    assert measure(html, TEXTS, tmp_path, width=width) == []
    assert measure(html, FONT_SIZES, tmp_path, width=width) > 9


def test_faults_are_found(tmp_path: Path) -> None:
    """Check that the scripts of the tests above see what they look for."""
    texts = label(90, 20, "long text") + label(0, 40, "one") + label(5, 40, "two")
    faulty = Picture("Faulty", "", 100, 50, texts).svg()
    html = Page("Faults", "", (Section("Faults", (Html(faulty + '<p style="width:500px">wide</p>'),)),)).html()
    assert measure(html, TEXTS, tmp_path, width=PHONE) == [["cut", "long text"], ["one", "two"], ["two", "one"]]
    width, wider = measure(html, OVERFLOW, tmp_path, width=PHONE)
    assert (width, wider) == (516, ['<p style="width:500px">wide</p>'])


def test_lengths_of_bars_are_their_bytes(tmp_path: Path) -> None:
    bars = memory_bars(3)
    draw = figure(lambda width: draw_memory_bars(bars, width, limit_bytes=None, title="Memory"))
    html = Page("Bars", "", (Section("Memory", (draw,)),)).html()
    lengths = measure(html, BARS, tmp_path, width=DESKTOP)
    ratios = [length / lengths[0] for length in lengths]
    assert ratios == pytest.approx([bar.parts["parameters"] / bars[0].parts["parameters"] for bar in bars], rel=0.01)


@pytest.mark.parametrize(("dark", "ground"), [(False, GROUNDS[0]), (True, GROUNDS[1])])
def test_the_ground_follows_the_reader(dark: bool, ground: str, tmp_path: Path) -> None:
    picture = screenshot(page().html(), tmp_path, width=PHONE, dark=dark)
    color = "#" + "".join(f"{channel:02x}" for channel in picture.getpixel((2, 2)))
    assert color == ground


def test_hatches_are_drawn(tmp_path: Path) -> None:
    draw = figure(lambda width: draw_memory_bars(memory_bars(1), width, limit_bytes=80 * GIB, title="Memory"))
    html = Page("Bars", "", (Section("Memory", (draw,)),)).html()
    place = """
const {x, y, width, height} = page.querySelector(".wide rect.blue-hatch.cell").getBoundingClientRect();
return [x, y + window.scrollY, x + width, y + window.scrollY + height]"""
    area = [round(edge) for edge in measure(html, place, tmp_path, width=DESKTOP)]
    shown = screenshot(html, tmp_path, width=DESKTOP).crop(tuple(area))
    dark = sum(shown.getchannel("R").histogram()[:60])
    assert 0.2 < dark / (shown.width * shown.height) < 0.7
