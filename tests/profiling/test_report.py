"""The report of real runs and of run directories made by hand: tables, page and errors."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain.config.run import CheckpointConfig, EvaluationConfig
from meshtrain.pictures.tables import Table
from meshtrain.profiling.report.comparison import comparison
from meshtrain.profiling.report.figures import mfu, parts_of_time, typical
from meshtrain.profiling.report.page import report_page
from meshtrain.profiling.report.recorded import RecordedRun, read_run_directory
from meshtrain.profiling.report.tables import key_figures, tables
from meshtrain.runtime.failure import FAILURE_NAME
from tests.pictures.browser import FONT_SIZES, OVERFLOW, TEXTS, measure
from tests.profiling.directories import (
    FAULT,
    empty_timeline,
    failure,
    long_run,
    prediction,
    step,
    summary,
    write_directory,
)
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, steps_of, train_here


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of two processes that was stopped once and resumed."""
    directory = tmp_path_factory.mktemp("real") / "out"
    config = build_run(
        directory,
        "gpt2",
        build_plan((2, 1, 1, 1)),
        checkpoint=CheckpointConfig(every=2, keep=1),
        evaluation=EvaluationConfig(every=3),
    )
    config = config.model_copy(update={"data": config.data.model_copy(update={"validation": 0.2})})
    for part in (config.model_copy(update={"steps": 2}), config):
        run_on_ranks(2, train_here, part, joins=False)
    return directory


@pytest.fixture
def profiled(tmp_path: Path) -> RecordedRun:
    """Return a failed run with a prediction and a profile."""
    directory = tmp_path / "long"
    write_directory(directory, long_run(), predicted=prediction(), profiled=summary(), failed=failure())
    return read_run_directory(directory)


def report(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshtrain", "report", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def table_of(run: RecordedRun, title: str) -> Table:
    (found,) = [one for one in [*tables(run), *comparison(run)] if one.title.startswith(title)]
    return found


def test_real_run_is_shown(real: Path) -> None:
    shown = report("out", "--html", "page.html", cwd=real.parent)
    assert (shown.returncode, shown.stderr) == (0, "")
    steps = steps_of(real)
    for title in ("Run", "Steps", "Evaluations", "Time by part", "Checkpoints", "Starts"):
        assert f"\n{title} " in f"\n{shown.stdout}", title
    assert re.search(rf"^loss +{steps[-1]['loss']:.4f} *$", shown.stdout, re.MULTILINE)
    assert re.search(r"^steps +6 of 6 *$", shown.stdout, re.MULTILINE)
    assert re.search(r"^state +done *$", shown.stdout, re.MULTILINE)
    assert re.search(r"^restarts +1 *$", shown.stdout, re.MULTILINE)
    assert re.search(r"^mesh +pp 2 *$", shown.stdout, re.MULTILINE)
    assert shown.stdout.endswith("Page: page.html\n")
    page = (real.parent / "page.html").read_text(encoding="ascii")
    assert "<h1>Run out</h1>" in page
    assert f'<td class="number">{steps[-1]["loss"]:.4f}</td>' in page


def test_checkpoints_of_a_real_run_are_found_where_they_are(real: Path, tmp_path: Path) -> None:
    rows = table_of(read_run_directory(real), "Checkpoints").rows
    assert [row[0] for row in rows] == ["2", "4", "6"]
    assert rows[0][-1] == "removed, or on another machine"
    assert rows[-1][-1] == str(real / "checkpoints" / "step-6")
    assert rows[-1][-2].endswith("iB")
    # The run directory was copied, and the checkpoints with it.
    (tmp_path / "checkpoints" / "step-6").mkdir(parents=True)
    copied = replace(read_run_directory(real), directory=tmp_path)
    moved = [{"step": 6, "checkpoint_seconds": 1.0, "checkpoint": "/elsewhere/out/checkpoints/step-6"}]
    (row,) = table_of(replace(copied, metrics=tuple(moved)), "Checkpoints").rows
    assert row[-1] == str(tmp_path / "checkpoints" / "step-6")


def test_report_loads_no_torch(real: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from meshtrain.profiling.report.command import show_report; "
        f"show_report(Path({str(real)!r}), None); print(*sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy"} & set(shown.stdout.splitlines()[-1].split())


def test_key_figures_leave_out_the_first_step_after_a_start(profiled: RecordedRun) -> None:
    found = key_figures(profiled)
    assert found["time of a step"] == "800 ms"
    assert found["steps"] == "150 of 200"
    assert found["state"] == "failed"
    assert found["MFU"] == f"{400 / 989:.1%}"
    assert (found["restarts"], found["bad steps"]) == ("1", "1")
    assert (found["model"], found["mesh"]) == ("org/model-7b", "pp 2 x dp_shard 4")
    assert typical(profiled, "no such value") is None


def test_rate_of_an_unknown_machine_is_left_out(tmp_path: Path) -> None:
    unknown = replace(prediction(), peak_tflops=None, mfu=None)
    run = read_run_directory(write_directory(tmp_path / "run", long_run(), predicted=unknown))
    assert mfu(run) is None
    assert "MFU" not in key_figures(run)
    assert "MFU" not in report_page(run)
    assert "MFU" in report_page(read_run_directory(write_directory(tmp_path / "b", long_run(), predicted=prediction())))


def test_time_by_part_sums_up(profiled: RecordedRun) -> None:
    parts = {part.name: part for part in parts_of_time(profiled)}
    assert parts["data"].seconds == pytest.approx(150 * 0.05)
    assert parts["rest of the step"].seconds == pytest.approx(148 * 0.05 + 2 * 8.25)
    assert (parts["evaluation"].seconds, parts["evaluation"].number) == (12, 6)
    assert (parts["saving"].seconds, parts["saving"].typical) == (4.5, 1.5)
    whole = sum(row["seconds"] for row in profiled.steps) + 12 + 4.5
    assert sum(part.seconds for part in parts.values()) == pytest.approx(whole)


def test_bad_steps_and_starts_have_tables(profiled: RecordedRun) -> None:
    assert table_of(profiled, "Bad steps").rows == (("100", "skip", FAULT, "0, 1, 2, 3, 4, 5, 6, 7, ..."),)
    assert table_of(profiled, "Starts").rows == (("1", "0", "abc"), ("2", "80", "def"))
    checkpoints = table_of(profiled, "Checkpoints")
    assert checkpoints.columns == ("step", "training waited", "in the background", "where")
    assert checkpoints.rows[0] == ("40", "1.50 s", "6 s", "s3://b/step-40")
    assert table_of(profiled, "Evaluations").columns == ("step", "loss", "web", "time")
    losses = {"eval_loss": 3.0, "eval_loss/web": 3.5, "eval_loss_ema": 2.9}
    evaluation = {"step": 150, **losses, "evaluation_seconds": 2.0}
    averaged = table_of(replace(profiled, metrics=(*profiled.metrics, evaluation)), "Evaluations")
    assert averaged.columns == ("step", "loss", "web", "average of weights", "time")
    assert averaged.rows[-1] == ("150", "3.0000", "3.5000", "2.9000", "2 s")
    assert len(table_of(profiled, "Steps").rows) == 12


def test_long_tables_have_the_latest_rows(profiled: RecordedRun) -> None:
    starts = tuple({"step": number, "parameters_checksum": "abc"} for number in range(1_500))
    found = table_of(replace(profiled, metrics=starts), "Starts")
    assert found.title == "Starts, the latest 20 of 1,500"
    assert [found.rows[0][:2], found.rows[-1][:2]] == [("1481", "1,480"), ("1500", "1,499")]
    assert found.title in report_page(replace(profiled, metrics=starts))


def test_predicted_and_measured_are_compared(profiled: RecordedRun) -> None:
    found = table_of(profiled, "Predicted for h100-80gb (assumed rates), and measured")
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["time of a step"] == ("750 ms", "800 ms", "1.07")
    assert rows["tokens/s per process"][0] == "11,000"
    assert rows["MFU"] == ("45.0%", "40.4%", "0.90")
    assert rows["bubble"][2] == "1.00"
    assert rows["peak memory, pp rank 1"] == ("50 GiB", "51 GiB", "1.02")
    assert rows["messages over dp_shard"] == ("30 GiB", "30 GiB", "1.00")
    assert rows["messages over dp_shard, time"] == ("200 ms", "250 ms", "1.25")
    assert rows["messages over pp, exposed time"] == ("10 ms", "", "")
    messages = table_of(profiled, "Messages of a process in a step, average of steps 20 to 24")
    # All processes do the same, so one stands for all.
    assert [row[0] for row in messages.rows] == ["0", "0", "0"]
    assert messages.rows[0] == ("0", "dp_shard", "all_gather_into_tensor", "64", "20 GiB", "150 ms")


def test_prediction_without_a_profile_is_compared_with_the_metrics(tmp_path: Path) -> None:
    bare = replace(prediction(), timeline=empty_timeline())
    run = read_run_directory(write_directory(tmp_path / "run", long_run(), predicted=bare))
    rows = {row[0]: row[1:] for row in table_of(run, "Predicted").rows}
    assert rows["peak memory"] == ("68 GiB", "70 GiB", "1.03")
    assert rows["bubble"] == ("25.0%", "", "")
    assert rows["messages over pp"] == ("1 GiB", "", "")
    assert "Timeline of a step" not in report_page(run)


def test_page_has_charts_timelines_and_the_failure(profiled: RecordedRun) -> None:
    page = report_page(profiled)
    assert page.isascii()
    for title in (
        "Loss",
        "Learning rate",
        "Gradient norm before clipping",
        "Tokens per second",
        "TFLOP/s of each process",
        "MFU",
        "Time of a step by part",
        "Time of the run by part",
        "Peak memory by pp rank",
        "Most memory of a process so far",
        "Timeline of a step",
        "Messages of rank 0 in a step",
    ):
        assert f"<figcaption>{title}</figcaption>" in page, title
    assert "RuntimeError: CUDA error &lt;b&gt;" in page
    assert "Predicted: 662 ms, bubble" in page
    assert "Measured: 695 ms, bubble" in page
    assert "Started again after step 80" in page
    assert f"Step 100 was bad: {FAULT}" in page
    assert "model.path = &quot;org/model-7b&quot;" in page


@pytest.mark.parametrize("width", [360, 1280])
def test_page_fits_the_screen(width: int, profiled: RecordedRun, tmp_path: Path) -> None:
    page = report_page(profiled)
    assert measure(page, OVERFLOW, tmp_path, width=width) == [width, []]
    assert measure(page, TEXTS, tmp_path, width=width) == []
    assert measure(page, FONT_SIZES, tmp_path, width=width) > 9


def test_run_that_has_done_no_step_is_shown(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "run", [{"step": 0, "parameters_checksum": "abc"}])
    run = read_run_directory(directory)
    assert key_figures(run)["steps"] == "0 of 200"
    assert [table.title for table in tables(run)] == ["Starts"]
    assert "<h2" in report_page(run)


def test_directory_with_metrics_only_is_shown(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "run", [step(1), step(2, loss=None, memory_bytes=None)])
    for name in ("run.toml", "plan.toml"):
        (directory / name).unlink()
    shown = report("run", "--html", "page.html", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "not finite" in shown.stdout


def test_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "run", [step(1), step(2)])
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in read_run_directory(directory).steps] == [1, 2]


METRICS = json.dumps(step(1)) + "\n"
WRONG: dict[str, tuple[dict[str, str], list[str], str]] = {
    "no directory": ({}, ["nowhere"], "nowhere does not exist; pass the run_directory of a run"),
    "a file": ({"run.toml": ""}, ["run/run.toml"], "run/run.toml is not a directory; pass the run_directory of a run"),
    "no metrics": (
        {"run.toml": ""},
        ["run"],
        "run has no metrics.jsonl; pass the run_directory of a run that has done a step",
    ),
    "failed early": (
        {FAILURE_NAME: failure().to_json()},
        ["run"],
        "run has no metrics.jsonl; the run failed before its first step: rank 3 on node7 failed in step 151, stage 0, "
        "forward: RuntimeError: CUDA error <b>",
    ),
    "empty metrics": (
        {"metrics.jsonl": '{"st'},
        ["run"],
        "run/metrics.jsonl is empty; wait until the run has done a step",
    ),
    "damaged metrics": (
        {"metrics.jsonl": f"{METRICS}{{\n{METRICS}"},
        ["run"],
        "run/metrics.jsonl, line 2: not JSON; remove the line",
    ),
    "foreign metrics": (
        {"metrics.jsonl": f"{METRICS}[1]\n"},
        ["run"],
        "run/metrics.jsonl, line 2: not an object with a `step`; remove the line",
    ),
    "metrics that are texts": (
        {"metrics.jsonl": '{"step": 1, "loss": "low"}\n'},
        ["run"],
        "run/metrics.jsonl, line 1: loss is 'low', not a number; remove the line",
    ),
    "damaged run file": (
        {"metrics.jsonl": METRICS, "run.toml": "steps ="},
        ["run"],
        "run/run.toml cannot be read: Invalid value (at end of document); correct it, or move it away",
    ),
    "damaged failure": (
        {"metrics.jsonl": METRICS, FAILURE_NAME: "{}"},
        ["run"],
        "run/failure.json is damaged; move it away",
    ),
    "damaged prediction": (
        {"metrics.jsonl": METRICS, "prediction.json": "\n\n{"},
        ["run"],
        "run/prediction.json: line 3: not JSON; remove the file, or write it again",
    ),
    "a page in no directory": (
        {"metrics.jsonl": METRICS},
        ["run", "--html", "nowhere/page.html"],
        "--html: nowhere is not a directory; create it, or choose another one",
    ),
    "a page that is a directory": (
        {"metrics.jsonl": METRICS},
        ["run", "--html", "run"],
        "--html: run is a directory; pass the name of a file",
    ),
    "a page with a long name": (
        {"metrics.jsonl": METRICS},
        ["run", "--html", "p" * 250],
        f"--html: {'p' * 250} cannot be written: File name too long; choose another file",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistake_is_one_line_with_exit_code_2(name: str, tmp_path: Path) -> None:
    files, arguments, message = WRONG[name]
    (tmp_path / "run").mkdir()
    for file, text in files.items():
        (tmp_path / "run" / file).write_text(text)
    shown = report(*arguments, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (2, f"error: {message}\n")
