"""`meshtrain plan --html`: the page shows what is printed, as drawings and tables."""

import re
from contextlib import redirect_stdout
from html import unescape
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

from meshtrain import cli
from meshtrain.pictures.colors import GROUNDS
from tests.pictures.browser import FONT_SIZES, OVERFLOW, TEXTS, measure, screenshot
from tests.planning.files import RUN, write_machine, write_run

NAME = "a <b>run & more"
SECTIONS = ["Summary", "Mesh", "Memory", "Time", "Messages and work", "Plan", "Machine"]
NOT_PRINTED = ("Stages", "Constants of h100-80gb")


class Shown(NamedTuple):
    """What the command has shown: exit code, text on the screen with single spaces, page."""

    code: int
    printed: str
    page: str


def plan(directory: Path, gpu: str, *overrides: str, text: str = RUN) -> Shown:
    html, screen = directory / "plan.html", StringIO()
    run = write_run(directory, text)
    with redirect_stdout(screen):
        code = cli._exit_code(["plan", run, "--gpu", gpu, "--html", str(html), *overrides])
    return Shown(code, " ".join(screen.getvalue().split()), html.read_text())


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Return what a run over 2 pp ranks needs of a machine whose speed is known."""
    text = RUN.replace('run_directory = "run"', f'run_directory = "{NAME}"')
    return plan(tmp_path_factory.mktemp("plan"), "h100-80gb", "--world-size", "2", text=text)


def sections(page: str) -> list[str]:
    return re.findall(r"<h2[^>]*>(.*?)</h2>", page)


def tables(page: str) -> dict[str, list[list[str]]]:
    """Return title -> rows of the tables."""
    found = re.findall(r"<figcaption>([^<]*)</figcaption><div[^>]*><table>(.*?)</table>", page, re.DOTALL)
    return {
        unescape(title): [
            [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
            for row in re.findall(r"<tr>(.*?)</tr>", body)[1:]
        ]
        for title, body in found
    }


def figures(page: str) -> dict[str, str]:
    """Return the key figures."""
    return dict(re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", page))


def drawing(page: str, title: str) -> str:
    """Return the wide form of a drawing."""
    return re.findall(rf'<svg role="img"[^>]*><title>{re.escape(title)}.*?</svg>', page, re.DOTALL)[0]


def tips(svg: str) -> list[str]:
    return [unescape(tip) for tip in re.findall(r"<title>([^<]*)</title></", svg)]


def texts(svg: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def test_every_row_of_the_page_is_printed(shown: Shown) -> None:
    assert shown.code == 0
    found = tables(shown.page)
    assert [title for title in found if title not in NOT_PRINTED] == [
        "Memory of a process at its peak, in GiB",
        "Messages of a process in a step, where they cost most",
        "Messages of a process in a step",
        "Work of a process in a step",
        next(title for title in found if title.startswith("Plan ")),
        "Messages per microbatch",
    ]
    for title, rows in found.items():
        assert rows
        for row in rows:
            assert title in NOT_PRINTED or " ".join(" ".join(row).split()) in shown.printed, row


def test_sentences_and_key_figures_are_those_printed(shown: Shown) -> None:
    assert sections(shown.page) == SECTIONS
    remarks = [unescape(text) for text in re.findall(r"<p[^>]*>(.*?)</p>", re.sub("</?code>", "`", shown.page))]
    (verdict,) = re.findall(r'<p class="verdict">(.*?)</p>', shown.page)
    (time,) = [text for text in remarks if text.startswith("A step takes ")]
    assert verdict in shown.printed
    assert time in shown.printed
    assert any(text.startswith("Assumed, not measured: 2 GiB") and text in shown.printed for text in remarks)
    assert any(text.startswith("From datasheets or assumed") and text in shown.printed for text in remarks)
    found = figures(shown.page)
    assert f"A step takes {found['time of a step']}, {found['bubble']} of it waiting for other stages" in shown.printed
    assert f": {found['tokens/s per process']} tokens per second and process, MFU {found['MFU']}" in shown.printed
    assert found["fits"].removeprefix("yes, ").removesuffix(" left") + " are left" in shown.printed
    assert (found["processes"], found["mesh"], found["machine"]) == ("2", "pp 2", "h100-80gb")
    peaks = [row[1] for row in tables(shown.page)["Memory of a process at its peak, in GiB"]]
    assert found["peak memory"] == f"{max(peaks, key=float)} GiB"


def test_mesh_has_a_cell_for_each_process(shown: Shown) -> None:
    svg = drawing(shown.page, "The mesh: pp 2 = 2 processes")
    cells = tips(svg)
    assert [cell.partition(".")[0] for cell in cells] == [
        "rank 0: pp 0, dp_replicate 0, dp_shard 0, ep 0, cp 0, tp 0",
        "rank 1: pp 1, dp_replicate 0, dp_shard 0, ep 0, cp 0, tp 0",
    ]
    assert "stage 0: embedding, layers 0-2; 4.26 M parameters" in cells[0]
    assert "stage 1: layer 3, head; 2.79 M parameters" in cells[1]
    assert [row[2] for row in tables(shown.page)["Stages"]] == ["embedding, layers 0-2", "layer 3, head"]


def test_bars_add_up_to_what_the_machine_must_have(shown: Shown) -> None:
    svg = drawing(shown.page, "Memory of a process at its peak")
    parts = tips(svg)
    for rank in (0, 1):
        row = tables(shown.page)["Memory of a process at its peak, in GiB"][rank]
        assert any(tip == f"rank {rank}: reserved 2 GiB, {row[-1]}" for tip in parts)
        assert any(tip.startswith(f"rank {rank}: fragmentation") for tip in parts)
    assert "limit 79.1 GiB" in texts(svg)


def test_curve_has_the_peak_that_is_printed(shown: Shown) -> None:
    row = tables(shown.page)["Memory of a process at its peak, in GiB"][0]
    svg = drawing(shown.page, "Memory over the step, rank 0")
    (peak,) = re.findall(r"<desc>The peak is at (.*?): ([\d.]+) MiB", svg)
    assert peak[0] == row[-1]
    assert float(peak[1]) / 1024 == pytest.approx(float(row[1]), abs=0.005)
    assert "limit for tensors 73.4 GiB" in texts(svg)
    assert "ms" in texts(svg), "the unit of the time"


def test_timeline_has_a_span_for_each_pass(shown: Shown) -> None:
    svg = drawing(shown.page, "Timeline of a step")
    assert f"bubble {figures(shown.page)['bubble']}" in " ".join(texts(svg))
    assert {"rank 0", "rank 1"} <= set(texts(svg))
    passes = [tip.partition(":")[0] for tip in tips(svg) if "microbatch" in tip]
    assert sorted(passes) == sorted(
        f"{kind} of microbatch {microbatch}, stage {stage}"
        for kind in ("forward", "backward")
        for microbatch in range(4)
        for stage in range(2)
    )


def test_messages_and_constants_are_shown(shown: Shown) -> None:
    rows = tables(shown.page)["Messages of a process in a step"]
    bars = tips(drawing(shown.page, "Messages of rank 0 in a step"))
    for _, axis, operator, number, _ in (row for row in rows if row[0] == "0"):
        assert any(bar.startswith(f"{axis} {operator}: {number} ×") for bar in bars)
    constants = {row[0]: row[1:] for row in tables(shown.page)["Constants of h100-80gb"]}
    assert constants["memory_gib"] == ["79.1", "estimated from the NVIDIA H100 SXM datasheet (80 GB HBM3)"]
    assert constants["within_host"][0] == "360 GB/s, 5 µs"
    assert constants["peak_tflops"][0] == "float32 67, float16 989, bfloat16 989, float8 1979"
    assert constants["attention_efficiency"][0] == "0.03 at 1e8, 0.35 at 1e10, 0.45 at 1e11"
    assert "operators" not in constants, "the machine has none"


def test_page_is_one_safe_file(shown: Shown) -> None:
    assert shown.page.isascii()
    assert "<b>" not in shown.page
    assert "a &lt;b&gt;run &amp; more: 2 processes on h100-80gb" in shown.page
    assert not re.search(r"<(script|link|img|iframe)|https?:", shown.page)
    assert "[mesh]" in shown.page, "the plan as a file"
    assert "Page: " in shown.printed


def test_run_that_does_not_fit_has_verdict_and_advice_and_no_seconds(tmp_path: Path) -> None:
    found = plan(tmp_path, write_machine(tmp_path, 0.16), "--world-size", "2")
    assert found.code == 1
    (verdict,) = re.findall(r'<p class="verdict alarm">(.*?)</p>', found.page)
    (advice,) = re.findall(r'<p class="advice">(.*?)</p>', found.page)
    assert verdict.startswith("It does not fit ")
    assert advice.startswith("With ")
    assert verdict in found.printed
    assert advice in found.printed
    assert re.search(r'<dd class="alarm">no, [\d.]+ GiB missing</dd>', found.page)
    assert "Time" not in sections(found.page)
    assert "has no table [speed]" in found.page
    assert "actions of the step" in texts(drawing(found.page, "Memory over the step, rank 0"))
    assert not {"time of a step", "MFU", "bubble"} & set(figures(found.page))
    assert "Timeline" not in found.page


def test_process_alone_sends_nothing(tmp_path: Path) -> None:
    found = plan(tmp_path, "cpu", "plan.mesh.pp=1", "--world-size", "1")
    assert found.code == 0
    assert "1 process on cpu" in found.page
    assert [title for title in tables(found.page) if title.startswith("Messages")] == []
    assert "rank 0" in texts(drawing(found.page, "Memory of a process at its peak"))


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_screens(width: int, dark: bool, shown: Shown, tmp_path: Path) -> None:
    assert measure(shown.page, OVERFLOW, tmp_path, width=width, dark=dark) == [width, []]
    assert measure(shown.page, TEXTS, tmp_path, width=width, dark=dark) == []
    assert measure(shown.page, FONT_SIZES, tmp_path, width=width, dark=dark) > 9
    ground = screenshot(shown.page, tmp_path, width=width, dark=dark).getpixel((2, 2))
    assert "#" + "".join(f"{channel:02x}" for channel in ground) == GROUNDS[dark]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "plan.html"], "--html shows what a plan needs on a machine; add --gpu, or leave it out"),
        (["--gpu", "cpu", "--html", "no/plan.html"], "--html: no is not a directory; create it, or choose another one"),
        (["--gpu", "cpu", "--html", "."], "--html: . is a directory; pass the name of a file"),
        (["--gpu", "cpu", "--html", "/dev/full/x"], "--html: /dev/full is not a directory"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._exit_code(["plan", write_run(tmp_path), *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {message}")
    assert not (tmp_path / "plan.html").exists()
