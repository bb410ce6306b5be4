"""`meshtrain learning-rate`: real trials on meshes, what they propose, and what they leave."""

import math
import re
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from meshtrain import cli
from meshtrain.api.train import train
from meshtrain.config.optimizer import GroupConfig, OptimizerConfig
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.tuning.rates.page import rates_page
from meshtrain.tuning.rates.proposal import Trial, propose
from meshtrain.tuning.rates.trial import Bounds, TrialHook, remove_scratch, scratch_directory, trial_config
from tests.casts import lift_float32_casts
from tests.pictures.browser import OVERFLOW, TEXTS, measure
from tests.ranks import run_on_ranks
from tests.training.runs import LLAMA_TEXT, RUN_TEXT, Mesh, build_plan, build_run, write_text

BOUNDS = Bounds(1e-5, 10.0, 25)
RATES = [1e-6 * 10 ** (place / 20) for place in range(121)]


def curve(rate: float) -> float:
    """Return a loss that falls fastest at 1e-3, is lowest near 1e-2 and rises after it."""
    return 10 - 6 / (1 + (1e-3 / rate) ** 2) + (rate / 3e-2) ** 2


def test_rates_are_proposed_where_the_loss_falls_and_below_where_it_rises() -> None:
    found = propose(Trial(RATES, [curve(rate) + 0.02 * (-1) ** place for place, rate in enumerate(RATES)]))
    assert found.steepest == pytest.approx(1e-3, rel=0.3)
    assert found.lowest == pytest.approx(5e-3, rel=1.0)
    assert found.rising is not None
    assert curve(found.rising) == pytest.approx(1.1 * curve(found.lowest), rel=0.1)
    assert found.below_rising == found.rising / 10
    first, second = found.sentences()
    assert (
        first
        == f"The loss falls fastest at {found.steepest:.1e}: proposed is optimizer.learning_rate={found.steepest:.1e}"
    )
    assert second.endswith(
        f"rises from {found.rising:.1e}; the usual advice, a factor of 10 below, is {found.rising / 10:.1e}"
    )


def test_curves_without_a_fall_or_a_rise_say_what_to_change() -> None:
    flat = propose(Trial(RATES, [5.0 + place for place in range(len(RATES))]))
    assert flat.sentences() == ["The loss does not fall at any of these rates: pass a lower --lowest or more --steps"]
    falling = propose(Trial(RATES, [curve(rate) for rate in RATES if rate < 5e-3]))
    assert falling.rising is None
    assert falling.sentences()[1] == "It does not rise again: a higher --highest would show where it does"
    broken = propose(Trial(RATES, [curve(rate) if rate < 5e-3 else math.nan for rate in RATES]))
    assert broken.rising == next(rate for rate in RATES if rate >= 5e-3)
    assert len(broken.smooth) < len(RATES)


def try_on_mesh(directory: Path, mesh: Mesh) -> Trial:
    lift_float32_casts()
    hook = TrialHook(BOUNDS)
    config = build_run(directory, "gpt2", build_plan(mesh))
    train(trial_config(config, BOUNDS), [hook])
    assert hook.is_enough
    if rank_from_environment() == 0:
        left = {path.name for path in scratch_directory(config).iterdir() if not path.name.startswith(".")}
        assert left == {"run.toml", "plan.toml", "metrics.jsonl"}, "no checkpoint and no events"
        remove_scratch(config)
    return hook.trial


@pytest.mark.parametrize("mesh", [(2, 1, 1, 1), (1, 1, 1, 2)])
def test_trials_on_all_meshes_find_the_same_and_leave_nothing(mesh: Mesh, tmp_path: Path) -> None:
    (alone,) = run_on_ranks(1, try_on_mesh, tmp_path / "one", (1, 1, 1, 1), joins=False)
    assert alone.rates[:2] == pytest.approx([1e-5, 1e-5 * 10 ** (6 / 24)])
    assert len(alone.rates) < 25, "it ended early"
    for trial in run_on_ranks(2, try_on_mesh, tmp_path / "two", mesh, joins=False):
        assert trial.rates == alone.rates
        # Before it grows without bound, where rounding counts.
        assert trial.losses[:15] == pytest.approx(alone.losses[:15], rel=1e-9)
    assert {path.name for path in tmp_path.iterdir()} == {"text.jsonl", "cache"}


def run_command(directory: Path, *arguments: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of the command."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = cli._exit_code(["learning-rate", str(directory / "run.toml"), *arguments])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = RUN_TEXT + LLAMA_TEXT + "[plan.precision]\ncompute = 'float32'\n"
    (tmp_path / "run.toml").write_text(text)
    write_text(tmp_path / "text.jsonl")
    return tmp_path


def test_command_shows_a_table_a_proposal_and_a_page(here: Path) -> None:
    ((code, out, err),) = run_on_ranks(1, run_command, here, "--steps", "25", "--highest", "10", joins=False)
    assert (code, err) == (0, "")
    assert out.startswith("Learning rates from 1.0e-07 to 1.0e+01 in 25 steps\n")
    assert re.search(r"^step 1/25  loss \d\.\d{3}  lr 1\.0e-07 ", out, re.MULTILINE)
    assert re.search(r"^learning rate +loss +averaged *$", out, re.MULTILINE)
    assert re.search(r"^ *1\.0e-07 +\d\.\d{4} +\d\.\d{4} *$", out, re.MULTILINE)
    assert re.search(r"^The loss falls fastest at (\S+): proposed is optimizer\.learning_rate=\1$", out, re.MULTILINE)
    assert out.endswith("\nPage: learning-rate.html\n")
    assert "Done" not in out
    assert {path.name for path in here.iterdir()} == {"run.toml", "text.jsonl", "cache", "learning-rate.html"}
    page = (here / "learning-rate.html").read_text(encoding="ascii")
    assert "learning rate, logarithmic" in page
    assert "Flag: a proposal." in page


@pytest.mark.parametrize(("width", "dark"), [(360, False), (1280, True)])
def test_page_fits_screens(width: int, dark: bool, tmp_path: Path) -> None:
    trial = Trial(RATES, [curve(rate) for rate in RATES])
    page = rates_page(trial, propose(trial), "a <b>run")
    assert "<b>" not in page
    assert measure(page, OVERFLOW, tmp_path, width=width, dark=dark) == [width, []]
    assert measure(page, TEXTS, tmp_path, width=width, dark=dark) == []


def test_adamw_beside_muon_keeps_its_ratio(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(name="muon", learning_rate=2e-2, adamw_learning_rate=3e-4)
    config = build_run(tmp_path / "run", "qwen3", build_plan((1, 1, 1, 1)), optimizer=optimizer)
    found = trial_config(config, Bounds(1e-5, 1.0, 20)).optimizer
    assert found.adamw_learning_rate == pytest.approx(3e-4 / 2e-2)


def test_groups_keep_their_ratio_to_the_rest(tmp_path: Path) -> None:
    config = build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1)))
    groups = [GroupConfig(parameters=["a"], learning_rate=1e-3), GroupConfig(parameters=["b"], weight_decay=0.0)]
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"groups": groups})})
    found = trial_config(config, Bounds(1e-5, 1.0, 20)).optimizer
    assert [group.learning_rate for group in found.groups] == [pytest.approx(0.1), None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--lowest", "1", "--highest", "1"],
            "--lowest 1 and --highest 1: expected rates above 0 to 10; pass the lower",
        ),
        (["--lowest", "0"], "--lowest 0 and --highest 1: expected rates above 0 to 10"),
        (["--highest", "11"], "--lowest 1e-07 and --highest 11: expected rates above 0 to 10"),
        (["--html", "no/x.html"], "--html: no is not a directory; create it, or choose another one"),
        (
            ["optimizer.learning_rat=3"],
            "command line: optimizer.learning_rat: unknown key; did you mean 'learning_rate'?",
        ),
        (["--steps", "5"], "Invalid value for '--steps': Input should be greater than or equal to 10"),
    ],
)
def test_mistakes_are_one_line(here: Path, arguments: list[str], message: str) -> None:
    code, out, err = run_command(here, *arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"error: {message}")
