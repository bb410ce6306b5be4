"""A user's hook gets the same metrics as the built-in ones, and its requests reach all ranks."""

import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshtrain
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.run import BadStepsConfig, CheckpointConfig, EvaluationConfig, RunConfig
from meshtrain.config.toml import dump_toml
from meshtrain.errors import ConfigError, TrainingStopped
from meshtrain.training.hooks import Hook, Metrics, RunState, check_hooks
from meshtrain.training.optim import build_optimizer
from meshtrain.training.saving import restore_state
from meshtrain.training.state import TrainState
from tests.chaos.stops import torchrun
from tests.parallel.steps import start
from tests.parity import Case
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, poison_gradient, read_checkpoint, read_metrics, train_here
from tests.training.test_metrics import evaluated_run
from tests.training.test_resume import without_torchrun

# The values of these keys are those of one rank.
TIMES = ("seconds", "_per_second", "memory_bytes")
Call = dict[str, Any]


class Recorder(Hook):
    """Records all calls, and communicates with the recorders on other ranks at every call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def _note(self, moment: str, state: RunState, metrics: Metrics) -> None:
        is_over = moment == "end" and state.failure is not None
        steps = [0] * dist.get_world_size()
        if not is_over:
            dist.all_gather_object(steps, state.step)
            assert set(steps) == {state.step}
        norm = sum(
            float(p.detach().to_local().sum()) if hasattr(p, "to_local") else float(p.detach().sum())
            for _, p in state.model.named_parameters()
        )
        self.calls.append(
            {
                "moment": moment,
                "step": state.step if state.saved is None else state.saved.step,
                "metrics": dict(metrics),
                "note": dict(state.note),
                "saved": state.saved.directory.name if state.saved is not None else None,
                "exists": state.saved is not None and state.saved.directory.is_dir(),
                "epoch_ends": state.epoch_ends,
                "ending": (state.stopped_by, type(state.failure).__name__),
                "parameters": norm,
            }
        )

    def on_start(self, state: RunState, metrics: Metrics) -> None:
        self._note("start", state, metrics)

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        self._note("step", state, metrics)

    def on_evaluation(self, state: RunState, metrics: Metrics) -> None:
        self._note("evaluation", state, metrics)

    def on_checkpoint(self, state: RunState, metrics: Metrics) -> None:
        self._note("checkpoint", state, metrics)

    def on_end(self, state: RunState, metrics: Metrics) -> None:
        self._note("end", state, metrics)


def train_with(config: RunConfig, *hooks: Hook) -> tuple[str, str]:
    """Train on this rank; return the output and the reason for a stop."""
    message = ""
    with redirect_stdout(StringIO()) as shown:
        try:
            train_here(config, hooks)
        except TrainingStopped as stopped:
            message = str(stopped)
    return shown.getvalue(), message


def record(config: RunConfig) -> tuple[list[Call], str]:
    recorder = Recorder()
    return recorder.calls, train_with(config, recorder)[0]


def rows_of(calls: list[Call]) -> list[dict[str, Any]]:
    """Return the expected rows of metrics.jsonl, without the averages of epochs."""
    rows = []
    for call in calls:
        if call["moment"] != "end":
            rows += [{"step": call["step"], **values} for values in (call["metrics"], call["note"]) if values]
    return rows


def without_times(calls: list[Call]) -> list[Call]:
    kept = {"moment", "step", "note", "saved", "exists", "epoch_ends", "ending"}
    return [
        {key: call[key] for key in kept}
        | {"metrics": {name: value for name, value in call["metrics"].items() if not name.endswith(TIMES)}}
        for call in calls
    ]


@pytest.mark.parametrize("in_background", [False, True])
def test_user_hook_gets_the_metrics_of_the_files(tmp_path: Path, in_background: bool) -> None:
    config = evaluated_run(tmp_path / "out", (2, 1, 1, 1))
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every=3, in_background=in_background)})
    (calls, shown), (others, nothing) = run_on_ranks(2, record, config, joins=False)

    written = [row for row in read_metrics(tmp_path / "out") if "epoch_steps" not in row]
    # The file also records the publication of a checkpoint.
    without_location = [[item for item in row.items() if item[0] != "checkpoint"] for row in written]
    assert [list(row.items()) for row in rows_of(calls)] == without_location
    assert without_times(calls) == without_times(others)
    assert nothing == ""
    moments = [call["moment"] for call in calls if call["moment"] != "checkpoint"]
    steps = ["step", "step", "evaluation", "step", "step", "evaluation", "step", "step", "evaluation"]
    assert moments == ["start", *steps, "end"]
    assert [call["step"] for call in calls if call["epoch_ends"]] == [3, 6]
    saved = [call for call in calls if call["saved"]]
    assert [(call["saved"], call["exists"]) for call in saved] == [("step-3", True), ("step-6", True)]
    begun = [call["step"] for call in calls if call["moment"] == "checkpoint" and not call["saved"]]
    assert begun == ([3, 6] if in_background else [])
    assert [line for line in shown.splitlines() if line.startswith("Saved")] == [
        f"Saved {tmp_path}/out/checkpoints/step-{step}" for step in (3, 6)
    ]
    latest = {**saved[-1]["metrics"], **calls[-1]["metrics"]}
    assert latest == calls[-1]["metrics"]
    assert latest["eval_loss"] == next(
        call["metrics"]["eval_loss"] for call in reversed(calls) if "eval_loss" in call["metrics"]
    )
    assert len({call["parameters"] for call in calls if call["moment"] == "step"}) == 6


class StopsEarly(Hook):
    """Stops after `patience` evaluations; the count survives a restart."""

    def __init__(self, patience: int, rank: int) -> None:
        self.patience, self.rank = patience, rank

    def on_evaluation(self, state: RunState, metrics: Metrics) -> None:
        state.values["best"] = min(metrics["eval_loss"], state.values.get("best", float("inf")))
        state.values["seen"] = state.values.get("seen", 0) + 1
        if state.values["seen"] >= self.patience and dist.get_rank() == self.rank:
            state.request_stop()


def test_stop_request_of_one_rank_ends_all(tmp_path: Path) -> None:
    config = evaluated_run(tmp_path / "out", (2, 1, 1, 1))
    (shown, _), _ = run_on_ranks(2, train_with, config, StopsEarly(1, 1), joins=False)
    assert shown.splitlines()[-2:] == [
        f"Saved {tmp_path}/out/checkpoints/step-2",
        "Stopped by a hook: 2 of 6 steps are done; the same command resumes from there",
    ]
    (shown, _), _ = run_on_ranks(2, train_with, config, StopsEarly(2, 0), joins=False)
    assert shown.splitlines()[-1].startswith("Stopped by a hook: 4 of 6 steps are done")
    seen = [row["eval_loss"] for row in read_metrics(tmp_path / "out") if "eval_loss" in row]
    assert run_on_ranks(1, values_of, tmp_path / "out" / "checkpoints") == [{"best": min(seen), "seen": 2}]


def values_of(root: Path) -> dict[str, Any]:
    """Load a run's checkpoint in a separate program."""
    pipeline = start(
        Case("gpt2-tied", (1, 1, 1, 1)), model=build_run(root / "x", "gpt2", build_plan((1, 1, 1, 1))).model
    )
    state = TrainState(pipeline, build_optimizer(pipeline, OptimizerConfig()))
    restore_state(root, pipeline, state, missing_ok=False)
    return state.values


class SavesAside(Hook):
    """Saves the final state in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_start(self, state: RunState, metrics: Metrics) -> None:
        state.values["name"] = "aside"

    def on_end(self, state: RunState, metrics: Metrics) -> None:
        meshtrain.save_checkpoint(self.directory, state)


def test_hook_can_save_its_state_as_a_checkpoint(tmp_path: Path) -> None:
    config = build_run(tmp_path / "out", "gpt2", build_plan((2, 1, 1, 1)), steps=2)
    run_on_ranks(2, train_with, config, SavesAside(tmp_path / "aside"), joins=False)
    ours, theirs = read_checkpoint(tmp_path / "out"), read_checkpoint(tmp_path / "aside")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert run_on_ranks(1, values_of, tmp_path / "aside") == [{"name": "aside"}]


class Unlucky(Hook):
    """Raises a user error or another exception after a step on one rank."""

    def __init__(self, step: int, *, problem: tuple[str, str] | None = None) -> None:
        self.step, self.problem = step, problem

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        if state.step == self.step and dist.get_rank() == 1:
            if self.problem is None:
                raise ValueError("a mistake of the user's")
            state.report_problem(*self.problem)


def record_beside(config: RunConfig, hook: Hook) -> tuple[list[Call], str, str]:
    recorder = Recorder()
    shown, message = train_with(config, recorder, hook)
    return recorder.calls, shown, message


def test_user_error_in_a_hook_of_one_rank_stops_all_with_one_line(tmp_path: Path) -> None:
    config = build_run(tmp_path / "out", "gpt2", build_plan((1, 2, 1, 1)))
    answers = run_on_ranks(2, record_beside, config, Unlucky(2, problem=("no room", "make some")), joins=False)
    for calls, shown, message in answers:
        assert message == "no room; make some"
        assert [call["moment"] for call in calls] == ["start", "step", "step", "end"]
        assert calls[-1]["ending"] == (None, "TrainingStopped")
        assert "Done" not in shown


def rewound(config: RunConfig) -> tuple[list[Call], str]:
    """Train on this rank; the gradient of step 4 is not finite, the first time."""
    poison_gradient(4)
    return record(config)


@pytest.mark.parametrize("policy", ["rewind", "skip"])
def test_hooks_are_notified_of_bad_steps(tmp_path: Path, policy: Any) -> None:
    config = build_run(
        tmp_path / "out",
        "gpt2",
        build_plan((1, 1, 1, 1)),
        steps=5,
        checkpoint=CheckpointConfig(every=2),
        bad_steps=BadStepsConfig(policy=policy),
    )
    ((calls, _),) = run_on_ranks(1, rewound, config, joins=False)
    events = [
        (call["moment"], call["step"], call["note"].get("answer")) for call in calls if call["moment"] != "checkpoint"
    ]
    first = [("start", 0, None), ("step", 1, None), ("step", 2, None), ("step", 3, None)]
    if policy == "rewind":
        assert events == [
            *first,
            ("start", 2, "rewind"),
            ("step", 3, None),
            ("step", 4, None),
            ("step", 5, None),
            ("end", 5, None),
        ]
        # The first notification of step 3 is superseded.
        calls = calls[:3] + calls[next(index for index, call in enumerate(calls) if call["note"].get("answer")) :]
        del calls[0]["note"]["parameters_checksum"]
    else:
        assert events == [*first, ("step", 4, "skip"), ("step", 5, None), ("end", 5, None)]
    notes = [row for row in read_metrics(tmp_path / "out") if "bad_step" in row]
    assert [{"step": call["step"], **call["note"]} for call in calls if "answer" in call["note"]] == notes
    assert len(notes) == 1


PROGRAM = """
import sys
import meshtrain

class Greets(meshtrain.Hook):
    def __init__(self, raises):
        self.raises = raises

    def on_step(self, state, metrics):
        if state.is_first_rank:
            print(f"hook: step {state.step} of {state.num_steps}, loss {metrics['loss']:.3f}", flush=True)
        if self.raises and state.step == 2 and not state.is_first_rank:
            raise ValueError("a mistake of the user's")

for run, raises in zip(sys.argv[1:], (False, True)):
    print(meshtrain.train(meshtrain.load_run(run), hooks=[Greets(raises)]))
"""


def test_program_with_a_hook_trains_run_files(tmp_path: Path) -> None:
    """Train two runs in sequence; the hook of the second raises."""
    for name in ("greets", "raises"):
        config = build_run(tmp_path / name, "gpt2", build_plan((1, 2, 1, 1)), steps=3)
        (tmp_path / f"{name}.toml").write_text(dump_toml(config))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = torchrun(*(str(tmp_path / name) for name in ("program.py", "greets.toml", "raises.toml")))
    environment = {**without_torchrun(), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    greets, raises = (
        [row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("greets", "raises")
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("hook: ")]
    assert lines[:5] == [
        f"hook: step {step} of 3, loss {losses[step - 1]:.3f}"
        for losses, steps in ((greets, (1, 2, 3)), (raises, (1, 2)))
        for step in steps
    ]
    assert len([line for line in done.stdout.splitlines() if line.startswith("step 1/3")]) == 2
    assert done.stdout.count("Ending.DONE") == 2
    assert done.stdout.count("Ending") == 2
    assert done.returncode != 0
    assert "ValueError: a mistake of the user's" in done.stderr
    assert "in on_step" in done.stderr
    assert "rank 0 stops: " in done.stderr


def join_before(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as raised:
        meshtrain.train(config)
    return str(raised.value)


def test_wrong_hooks_and_nested_process_groups_are_refused(tmp_path: Path) -> None:
    config = build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1)))
    assert run_on_ranks(1, join_before, config) == [
        "train joins the process group by itself, and this program has joined one already; call it in a program of its "
        "own, or leave that group with torch.distributed.destroy_process_group()"
    ]
    with pytest.raises(
        ConfigError, match=r"^hooks\[1\] is the class Recorder; pass an object of a subclass of meshtrain\.Hook$"
    ):
        check_hooks([Recorder(), Recorder])
    with pytest.raises(ConfigError, match=r"^hooks\[0\] is a function; pass an object"):
        meshtrain.train(config, hooks=[join_before])
    hook, metrics = Hook(), json.loads("{}")
    for moment in ("start", "step", "evaluation", "checkpoint", "end"):
        assert getattr(hook, f"on_{moment}")(None, metrics) is None


def stop_early(config: RunConfig) -> int:
    """Train with the hook of the docs, and return how many evaluations there were."""
    page = (Path(__file__).parents[2] / "docs/guides/own-loop.md").read_text()
    (code,) = (it for it in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class EarlyStopping" in it)
    directory = Path(config.run_directory)
    file = directory.with_name("early_stopping.py")
    file.write_text(code.partition("meshtrain.train(")[0])
    hook = runpy.run_path(str(file))["EarlyStopping"](patience=2)
    train_here(config, [hook])
    return sum("eval_loss" in row for row in read_metrics(directory))


def test_hook_of_the_docs_stops_early(tmp_path: Path) -> None:
    # Nothing is learned with this rate, so no evaluation is lower than the first one.
    run = build_run(tmp_path / "out", "qwen3", build_plan((1, 1, 1, 1)), steps=9)
    update = {
        "data": run.data.model_copy(update={"validation": 0.2}),
        "evaluation": EvaluationConfig(every=1),
        "optimizer": OptimizerConfig(learning_rate=1e-300),
    }
    assert run_on_ranks(1, stop_early, run.model_copy(update=update), joins=False) == [3]
