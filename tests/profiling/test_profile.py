"""A profiled run leaves a timeline, traces, memory and messages, and computes the same."""

import itertools
import re
import shutil
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.api.train import train
from meshtrain.compat.schedules import pass_orders
from meshtrain.config.run import BadStepsConfig, CheckpointConfig, ProfileConfig, RunConfig
from meshtrain.pictures.timeline import Lane
from meshtrain.profiling.files import PROFILE_NAME, ProfileSummary, read_summary
from meshtrain.training.hooks import Hook, Metrics, RunState
from tests.profiling.profiled import (
    measured_messages,
    predicted,
    profiled,
    summary_of,
    trace_of,
    train_profiled,
)
from tests.ranks import run_on_ranks
from tests.training.runs import Mesh, build_plan, build_run, poison_gradient, read_checkpoint, steps_of

MICROBATCHES = 4
PASSES = {
    "forward": "forward",
    "backward": "backward",
    "input gradient": "backward",
    "weight gradient": "backward of weights",
}


def run_of(directory: Path, mesh: Mesh, profile: list[int] | None, **changes: Any) -> RunConfig:
    """Return a run of as many steps as the profile needs."""
    schedule = changes.pop("schedule", "1F1B")
    config = build_run(directory, "gpt2", build_plan(mesh, schedule=schedule), checkpoint=CheckpointConfig(every=2))
    return config.model_copy(update={"steps": 5, "profile": ProfileConfig(steps=profile), **changes})


def check_lane(lane: Lane) -> None:
    """Check that the spans of a lane follow each other."""
    assert all(span.begin_seconds <= span.end_seconds for span in lane.spans)
    for one, other in itertools.pairwise(lane.spans):
        assert one.end_seconds == pytest.approx(other.begin_seconds, abs=1e-8)


def passes_of(lane: Lane) -> list[tuple[str, int | None, int | None]]:
    return [(PASSES[span.kind], span.stage, span.microbatch) for span in lane.spans if span.kind in PASSES]


def check_profile(config: RunConfig, orders: list[list[Any]]) -> ProfileSummary:
    """Check the files of a profile.

    Args:
        orders: the passes of each rank.
    """
    summary = summary_of(config)
    assert summary.steps == tuple(config.profile.steps or ())
    (seconds,) = {len(summary.step_seconds), summary.steps[1] - summary.steps[0]}
    assert seconds == 2
    for rank, (lane, order) in enumerate(zip(summary.timeline.lanes, orders, strict=True)):
        assert lane.name == f"rank {rank}"
        check_lane(lane)
        assert passes_of(lane) == [tuple(each) for each in order]
        whole = lane.spans[-1].end_seconds - lane.spans[0].begin_seconds
        assert whole == pytest.approx(min(summary.step_seconds), rel=0.2)
        ranges = Counter(event["name"] for event in trace_of(config, rank) if event.get("cat") == "user_annotation")
        for phase, stage, microbatch in order:
            assert ranges[f"{phase}, stage {stage}, microbatch {microbatch}"] == 1
        assert ranges["optimizer"] == ranges[f"step {summary.steps[1]}"] == 1
    expected = predicted(config)
    assert measured_messages(summary) == [messages for messages, _ in expected]
    for rank, (_, peak) in zip(summary.ranks, expected, strict=True):
        # gloo's threads may let go of a tensor late.
        assert 0.95 <= rank.peak_bytes / peak <= 1.3
        assert all(message.seconds > 0 for message in rank.messages)
    return summary


def test_profile_of_a_pipeline_changes_no_result(tmp_path: Path) -> None:
    config = run_of(tmp_path / "out", (2, 1, 1, 1), [3, 5])
    plain = run_of(tmp_path / "plain", (2, 1, 1, 1), None)
    shown, _ = profiled(config, plain)

    check_profile(config, pass_orders("1F1B", [0, 1], MICROBATCHES))
    lines = shown.splitlines()
    assert f"Profile of steps 3 to 5: {tmp_path}/out/profile; traces open in https://ui.perfetto.dev" in lines
    assert any(line.startswith("Measured step: 0.") and line.endswith(" s, median of 2") for line in lines)
    assert any(re.fullmatch(r"Bubble: [1-9][\d.]*% of the time, .+ wait for others", line) for line in lines)
    assert not (tmp_path / "plain" / PROFILE_NAME).exists()
    ours, theirs = read_checkpoint(tmp_path / "out"), read_checkpoint(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    losses = [[(step["loss"], step["grad_norm"]) for step in steps_of(tmp_path / name)] for name in ("out", "plain")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5


def test_profile_tells_input_gradients_from_weight_gradients(tmp_path: Path) -> None:
    config = run_of(tmp_path / "out", (2, 1, 1, 1), [3, 5], schedule="ZBVZeroBubble")
    profiled(config)
    summary = check_profile(config, pass_orders("ZBVZeroBubble", [0, 1, 1, 0], MICROBATCHES))
    kinds = {span.kind for lane in summary.timeline.lanes for span in lane.spans}
    assert kinds == {"forward", "input gradient", "weight gradient", "wait", "gradients", "optimizer", "other"}


def test_messages_have_the_axes_that_are_predicted(tmp_path: Path) -> None:
    config = run_of(tmp_path / "out", (1, 1, 2, 2), [3, 5])
    (shown,) = profiled(config)
    passes = [(phase, 0, microbatch) for microbatch in range(2) for phase in ("forward", "backward")]
    summary = check_profile(config, [passes] * 4)
    assert {axis for messages in measured_messages(summary) for axis, _ in messages} == {"dp_shard", "tp"}
    assert "Bubble" not in shown
    assert not any(span.kind == "wait" for lane in summary.timeline.lanes for span in lane.spans)


def continued(begun: RunConfig, name: str, **changes: Any) -> RunConfig:
    """Return a run that continues a copy of another one."""
    directory = Path(begun.run_directory).with_name(name)
    shutil.copytree(begun.run_directory, directory)
    return begun.model_copy(update={"run_directory": str(directory), "steps": 6, **changes})


def test_run_that_resumes_is_profiled_if_the_steps_lie_ahead(tmp_path: Path) -> None:
    begun = run_of(tmp_path / "begun", (1, 1, 1, 1), None, steps=2)
    profiled(begun)
    plain = continued(begun, "plain")
    runs = {f"from-{first}": [first, 5] for first in (2, 3, 4)}
    configs = [continued(begun, name, profile=ProfileConfig(steps=steps)) for name, steps in runs.items()]
    _, *shown = profiled(plain, *configs)
    for (first, last), printed in zip(list(runs.values())[:2], shown, strict=False):
        assert (
            f"Steps {first} to {last} are not profiled, because training starts after step 2; set profile.steps to "
            "later ones\n" in printed
        )
        assert read_summary(tmp_path / f"from-{first}") is None
    assert summary_of(configs[-1]).steps == (4, 5)
    assert [step["loss"] for step in steps_of(tmp_path / "from-4")] == [
        step["loss"] for step in steps_of(tmp_path / "plain")
    ]

    # A profile that is done stays.
    again = configs[-1].model_copy(update={"steps": 8})
    (shown_again,) = profiled(again)
    assert "profiled" not in shown_again
    assert summary_of(again).steps == (4, 5)


def train_rewound(config: RunConfig) -> str:
    """Train on this rank; the gradient of step 4 is not finite, the first time."""
    poison_gradient(4)
    return train_profiled(config)[0]


def test_rewind_begins_the_profile_again(tmp_path: Path) -> None:
    # Step 4 is bad. The run goes back to step 2: before, right before, or in the profiled steps.
    changes = {"bad_steps": BadStepsConfig(policy="rewind"), "steps": 6}
    profiles = [4, 5], [3, 5], [3, 4], [2, 5]
    configs = [
        run_of(tmp_path / f"from-{first}-to-{last}", (1, 1, 1, 1), [first, last], **changes) for first, last in profiles
    ]
    *_, shown = [run_on_ranks(1, train_rewound, config, joins=False)[0] for config in configs]
    for config in configs[:3]:
        summary = summary_of(config)
        assert len(summary.step_seconds) == summary.steps[1] - summary.steps[0]
        assert passes_of(summary.timeline.lanes[0])
    assert "Steps 2 to 5 are not profiled, because training starts after step 2" in shown
    assert read_summary(tmp_path / "from-2-to-5") is None


def test_run_whose_epochs_end_before_the_steps_says_so(tmp_path: Path) -> None:
    config = run_of(tmp_path / "out", (1, 1, 1, 1), [7, 20], steps=None, epochs=1, global_batch_size=16)
    (shown,) = profiled(config)
    lines = [line for line in shown.splitlines() if line.startswith("Steps ")]
    assert len(lines) == 1
    assert re.fullmatch(r"Steps 7 to 20 are not profiled, because the run ends after step \d", lines[0])


class Stopping(Hook):
    """Asks to stop after a step."""

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        if state.step == 3:
            state.request_stop()


def train_to_a_stop(config: RunConfig) -> str:
    with redirect_stdout(StringIO()) as printed:
        train(config, [Stopping()])
    return printed.getvalue()


def test_run_that_stops_early_says_that_it_is_not_profiled(tmp_path: Path) -> None:
    config = run_of(tmp_path / "out", (1, 1, 1, 1), [2, 5])
    (shown,) = run_on_ranks(1, train_to_a_stop, config, joins=False)
    # The request counts after the next step.
    assert "Steps 2 to 5 are not profiled, because the run stopped after step 4\n" in shown


def test_file_that_one_rank_cannot_write_stops_all(tmp_path: Path) -> None:
    config = run_of(tmp_path / "out", (1, 2, 1, 1), [2, 3])
    (tmp_path / "out" / PROFILE_NAME / "trace-rank-1.json.gz").mkdir(parents=True)
    answers = run_on_ranks(2, train_profiled, config, joins=False)
    for (message,) in answers:
        assert message == (
            f"cannot write the profile into {tmp_path}/out/profile: Is a directory, so training stopped; free disk "
            "space, or leave out profile.steps, then start the run again; it resumes from its newest checkpoint"
        )
    assert read_summary(tmp_path / "out") is None
    assert [step["step"] for step in steps_of(tmp_path / "out")] == [1, 2, 3]
