"""What was predicted and what was measured are compared in words."""

from pathlib import Path

import pytest

from meshtrain.pictures.timeline import Timeline
from meshtrain.profiling.comparison import MeasuredHook, Measurement, comparison_lines
from meshtrain.profiling.files import ProfiledRank, ProfileSummary
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, steps_of, train_here

GIB = 2**30


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (
            Measurement(1.31, 11 * GIB),
            [
                "Step: predicted 1.23 s, measured 1.31 s (+6.5%)",
                "Peak memory: predicted 10.00 GiB, measured 11.00 GiB (+10.0%)",
            ],
        ),
        (
            Measurement(0.5, 12 * GIB),
            [
                "Step: predicted 1.23 s, measured 0.5 s (-59.3%); the prediction is off by more than 10%",
                "Peak memory: predicted 10.00 GiB, measured 12.00 GiB (+20.0%); the prediction is off by more than 10%",
            ],
        ),
        (
            Measurement(None, None),
            [
                "Step: predicted 1.23 s, not measured: the run had no step after the 2 that warm up",
                "Peak memory: predicted 10.00 GiB, not measured: on a CPU the memory of the process is not that of its "
                "tensors, and only profile.steps measures that",
            ],
        ),
        (
            Measurement(1234.5, 10 * GIB),
            ["Step: predicted 1.23 s, measured 1,234 s (+100265.9%); the prediction is off"],
        ),
    ],
)
def test_comparison_says_how_far_a_prediction_is_off(measured: Measurement, expected: list[str]) -> None:
    lines = comparison_lines(step_seconds=1.23, peak_bytes=10 * GIB, measured=measured)
    for line, start in zip(lines, expected, strict=False):
        assert line.startswith(start)
        assert line.endswith("more than 10%") or line == start


def measured_run(directory: Path) -> Measurement:
    hook = MeasuredHook()
    train_here(build_run(directory, "gpt2", build_plan((1, 1, 1, 1)), steps=5), [hook])
    summary = ProfileSummary((2, 3), (0.1,), tuple(ProfiledRank(rank, 10 + rank, ()) for rank in (0, 1)), Timeline(()))
    assert hook.measurement(summary).peak_bytes == 11
    return hook.measurement()


def test_hook_measures_the_steps_after_the_first_two(tmp_path: Path) -> None:
    (found,) = run_on_ranks(1, measured_run, tmp_path / "out", joins=False)
    seconds = sorted(step["seconds"] for step in steps_of(tmp_path / "out")[2:])
    assert found == Measurement(seconds[1], None)
