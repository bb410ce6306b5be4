"""`meshtrain sweep`: real runs in processes of their own, their comparison, and what is refused."""

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from meshtrain import cli
from meshtrain.pictures.colors import GROUNDS
from meshtrain.profiling.report.recorded import read_run_directory
from meshtrain.runtime.apart import commands_in_turn
from meshtrain.tuning.sweep.choices import Combination
from meshtrain.tuning.sweep.command import prepare
from meshtrain.tuning.sweep.comparison import comparison_table, sentences, sweep_page
from meshtrain.tuning.sweep.outcome import Outcome, read_outcomes
from meshtrain.tuning.sweep.runs import SweepRun
from tests.pictures.browser import FONT_SIZES, OVERFLOW, TEXTS, measure, screenshot
from tests.profiling.directories import failure, long_run, write_directory
from tests.training.runs import LLAMA_TEXT, RUN_TEXT, build_plan, build_run, steps_of, write_text

SHORT = ["steps=[2]", "plan.precision.compute=['float32']", "model.config.num_hidden_layers=[1]"]
FILES = 'data.train=[["text.jsonl"],["missing.jsonl"]]'
GOOD, BAD = "train=text.jsonl", "train=missing.jsonl"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = RUN_TEXT.replace("sequence_length", "validation = 0.2\nsequence_length") + LLAMA_TEXT
    (tmp_path / "run.toml").write_text(text)
    write_text(tmp_path / "text.jsonl")
    return tmp_path


def sweep(*arguments: str) -> tuple[int, str]:
    """Return the exit code, and what this process has printed; its runs print for themselves."""
    with redirect_stdout(StringIO()) as screen:
        code = cli._exit_code(["sweep", "run.toml", *arguments])
    return code, screen.getvalue()


def rows(printed: str) -> dict[str, list[str]]:
    """Return the cells of the table, by the value of the key that differs."""
    table = re.split(r"─\n|\n *\n", printed)[1]
    return {cells[0]: cells[1:] for cells in (re.split(r" {2,}", line.strip()) for line in table.splitlines())}


def test_runs_are_trained_compared_and_resumed_and_a_failed_one_does_not_stop_the_others(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, printed = sweep(FILES.replace('["text.jsonl"],["missing.jsonl"]', '["missing.jsonl"],["text.jsonl"]'), *SHORT)
    assert code == 1
    assert f"== Run 1 of 2: {BAD}\n" in printed
    assert f"== Run 2 of 2: {GOOD}\n" in printed
    assert re.search(r"^error: .*missing\.jsonl", capfd.readouterr().err, re.MULTILINE), "of the run itself"
    found = rows(printed)
    losses = [metrics["loss"] for metrics in steps_of(here / "out" / GOOD)]
    assert len(losses) == 2
    assert found["missing.jsonl"] == ["failed"]
    assert found["text.jsonl"][:2] == ["done", "2"]
    assert found["text.jsonl"][4] == f"{losses[-1]:.4f}"
    assert f"Failed: {BAD}: exit code 2; its message is above\n" in printed
    assert re.search(rf"^Lowest evaluation loss at the end: \d\.\d{{4}}, {GOOD}$", printed, re.MULTILINE)
    assert printed.endswith("Page: out/sweep.html\n")
    assert {path.name for path in (here / "out").iterdir() if not path.name.startswith(".")} == {
        GOOD,
        f"{GOOD}.toml",
        f"{BAD}.toml",
        "sweep.html",
    }
    page = (here / "out" / "sweep.html").read_text(encoding="ascii")
    assert f'<td class="number">{losses[-1]:.4f}</td>' in page

    write_text(here / "missing.jsonl", seed=1)
    before = (here / "out" / GOOD / "metrics.jsonl").stat().st_mtime_ns
    code, printed = sweep(FILES, *SHORT)
    assert code == 0
    assert f"== Run 1 of 1: {BAD}\n" in printed
    assert (here / "out" / GOOD / "metrics.jsonl").stat().st_mtime_ns == before
    assert [row[0] for row in rows(printed).values()] == ["done", "done"]

    code, printed = sweep(FILES, *SHORT)
    assert code == 0
    assert "== Run" not in printed
    code, printed = sweep(FILES, *SHORT, "--slurm")
    assert (code, printed.splitlines()[-1]) == (0, "Nothing to do: all runs are done")

    assert sweep(FILES, *SHORT, "seed=[3]")[0] == 2, "these are other runs"
    assert "seed is 0 in that file and 3 in this run" in capfd.readouterr().err
    _, printed = sweep(FILES, *[one.replace("steps=[2]", "steps=[4]") for one in SHORT], "--slurm")
    assert [row[:2] for row in rows(printed).values()] == [["to do", "2"], ["to do", "2"]]


def test_script_of_an_array_job_starts_each_run(here: Path) -> None:
    code, printed = sweep("seed=[0,1]", *SHORT, "--slurm", "--processes", "3", "--directory", "all runs")
    assert code == 0
    assert [row[0] for row in rows(printed).values()] == ["to do", "to do"]
    assert printed.endswith("\nsbatch --nodes 1 --gpus-per-node 8 --time 12:00:00 'all runs/sweep.sh'\n")
    script = here / "all runs" / "sweep.sh"
    assert "\n#SBATCH --array=0-1\n" in script.read_text()
    # In place of launch/slurm.sh, which needs Slurm.
    (here / "launch").mkdir()
    (here / "launch" / "slurm.sh").write_text('echo "$PROCESSES $# $1"')
    for number in (0, 1):
        environment = {**os.environ, "SLURM_SUBMIT_DIR": str(here), "SLURM_ARRAY_TASK_ID": str(number)}
        shown = subprocess.run(["bash", script], capture_output=True, text=True, env=environment, check=True)
        assert shown.stdout == f"3 1 {here}/all runs/seed={number}.toml\n"


def test_each_run_has_its_own_place_for_checkpoints(here: Path) -> None:
    prepared = prepare(Path("run.toml"), ["seed=[0,1]", "checkpoint.directory=['elsewhere/all/']"], None, None)
    assert [run.config.checkpoint.directory for run in prepared.runs] == [
        f"{here}/elsewhere/all/seed={number}" for number in (0, 1)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["optimizer.learning_rat=[1,2]"],
            "command line: optimizer.learning_rat: unknown key; did you mean 'learning_rate'?",
        ),
        (["seed=3"], "command line: seed: a single value and not a list; write 'seed=[3]'"),
        (["seed=[0,'x']"], "seed=x: command line: seed: expected a whole number, found the string 'x'"),
        (["plan.mesh.tp=[1,2]"], "tp=2: "),
        (["global_batch_size=[8,9]", "micro_batch_size=[2]"], "global_batch_size=9: "),
        (
            ["seed=[0]", "machine=['h100-80gx']"],
            "machine = h100-80gx: there is no such description; did you mean",
        ),
        (["seed=[0]", "--processes", "none"], "--processes none: expected a whole number from 1, or `gpus`"),
        (["seed=[0]", "--directory", "held"], "held holds a run; pass another --directory for the sweep"),
        (["seed=[0]", "--directory", "run.toml/x"], "run_directory = run.toml/x/seed=0: run.toml is not a directory"),
    ],
)
def test_mistakes_are_one_line_before_any_run(
    here: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "held").mkdir()
    (here / "held" / "metrics.jsonl").touch()
    code = cli._exit_code(["sweep", "run.toml", *arguments])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    (line,) = shown.err.splitlines()
    assert line.startswith(f"error: {message}"), line
    assert not (here / "out").exists()


def test_torchrun_does_not_start_a_sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert cli._exit_code(["sweep", "run.toml", "seed=[0]"]) == 2
    assert "sweep starts the processes of its runs, but torchrun has started this one" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_command_once_and_no_other_begins(number: signal.Signals) -> None:
    program = (
        "import signal, sys, time\n"
        "got = []\n"
        f"signal.signal({number.value}, lambda *_: got.append(1))\n"
        "end = time.monotonic() + 20\n"
        "while not got and time.monotonic() < end: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "sys.exit(70 + len(got))"
    )
    before = signal.getsignal(number)
    with commands_in_turn() as commands:
        threading.Timer(0.5, os.kill, [os.getpid(), number]).start()
        assert commands.run([sys.executable, "-c", program]) == 71
        assert commands.asked is number
    assert signal.getsignal(number) is before


def outcomes(directory: Path, number: int) -> list[Outcome]:
    """Return finished runs made by hand, then one that failed and one that never began."""
    found = []
    for place in range(number):
        name = f"learning_rate=1e-{place},seed=0"
        values = [{key: _raised(key, value, place) for key, value in one.items()} for one in long_run()]
        write_directory(directory / name, values, failed=failure() if place == number - 1 else None)
        found.append(outcome(directory, name, steps=200 if place == number - 1 else 120))
    return [*found, outcome(directory, "learning_rate=9,seed=0", steps=2)]


def _raised(key: str, value: Any, by: int) -> Any:
    return value + by if key in ("loss", "eval_loss") and value is not None else value


def outcome(directory: Path, name: str, steps: int) -> Outcome:
    config = build_run(directory / name, "gpt2", build_plan((1, 1, 1, 1)), steps=steps)
    differing = dict(part.split("=") for part in name.split(","))
    run = SweepRun(Combination(name, differing, ()), config)
    run.file.write_text("seed = 0\n")
    recorded = read_run_directory(run.directory) if run.directory.exists() else None
    return Outcome(run, recorded)


def wide_drawing(page: str, title: str) -> str:
    (found,) = re.findall(rf'<div class="wide"><svg role="img"[^>]*><title>{title}</title>.*?</svg>', page, re.DOTALL)
    return found


def test_state_follows_from_the_files(tmp_path: Path) -> None:
    found = outcomes(tmp_path, 3)
    assert [one.state for one in found] == ["done", "done", "failed", "to do"]
    assert [one.state for one in read_outcomes([one.run for one in found], {found[3].run.name: 1})][3] == "failed"
    assert sentences(found)[0] == "Lowest evaluation loss at the end: 3.0000, learning_rate=1e-0,seed=0"
    assert sentences(found)[1].startswith("Failed: learning_rate=1e-2,seed=0: rank 3 on node7 failed in step 151")
    # The last step is not saved: after a kill the run goes on from step 120.
    assert outcome(tmp_path, found[0].run.name, steps=150).state == "to do"
    keeps_none = found[0].run.config.checkpoint.model_copy(update={"keep": 0, "every": None})
    config = found[0].run.config.model_copy(update={"steps": 150, "checkpoint": keeps_none})
    assert Outcome(SweepRun(found[0].run.combination, config), found[0].recorded).state == "done"
    for epochs, state in ((1, "to do"), (2, "to do")):
        config = found[0].run.config.model_copy(update={"steps": None, "epochs": epochs})
        assert Outcome(SweepRun(found[0].run.combination, config), found[0].recorded).state == state


def test_page_has_a_line_for_each_run_and_the_table(tmp_path: Path) -> None:
    found = outcomes(tmp_path, 3)
    page = sweep_page(found)
    chart = wide_drawing(page, "Training loss")
    for index in range(3):
        assert f'class="curve line{index}"' in chart
        assert f"learning_rate=1e-{index},seed=0" in chart
    for row in comparison_table(found).rows:
        assert all(cell in page for cell in row)
    assert not re.search(r"<(script|link|img|iframe)|https?:", page)
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", page) == ["Comparison", "Training loss", "Evaluation loss", "Run files"]


def test_a_run_that_diverged_does_not_hide_the_others(tmp_path: Path) -> None:
    (good, bad, *_) = outcomes(tmp_path, 3)
    assert "upper edge" not in sweep_page([good])
    rows = [{**row, "loss": 1e6} if row["step"] == 150 and "loss" in row else row for row in good.recorded.metrics]
    diverged = Outcome(bad.run, replace(good.recorded, metrics=tuple(rows)))
    page = sweep_page([good, diverged])
    assert "A loss far above that of the beginning is drawn at the upper edge." in page
    heights = re.findall(r'text-anchor="end" class="muted">([\d.,]+)</text>', wide_drawing(page, "Training loss"))
    assert heights[-1] == "10"


def test_many_runs_are_drawn_as_the_best_ones(tmp_path: Path) -> None:
    page = sweep_page(outcomes(tmp_path, 14))
    assert "The 12 runs with the lowest loss; the table has all." in page
    chart = wide_drawing(page, "Training loss")
    assert 'class="curve line11"' in chart
    assert 'class="curve line12"' not in chart


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1280, False)])
def test_page_fits_screens(width: int, dark: bool, tmp_path: Path) -> None:
    page = sweep_page(outcomes(tmp_path, 14))
    assert measure(page, OVERFLOW, tmp_path, width=width, dark=dark) == [width, []]
    assert measure(page, TEXTS, tmp_path, width=width, dark=dark) == []
    assert measure(page, FONT_SIZES, tmp_path, width=width, dark=dark) > 9
    ground = screenshot(page, tmp_path, width=width, dark=dark).getpixel((2, 2))
    assert "#" + "".join(f"{channel:02x}" for channel in ground) == GROUNDS[dark]
