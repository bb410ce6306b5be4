"""A run shows what is predicted for its machine at the start, and at the end what was measured."""

import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain import cli
from meshtrain.api.train import train
from meshtrain.config.distillation import DistillationConfig
from meshtrain.config.lora import LoraConfig
from meshtrain.config.plan import RecomputePlan
from meshtrain.config.preference import PreferenceConfig
from meshtrain.config.run import ModelConfig, ProfileConfig, RouterConfig, RunConfig
from meshtrain.config.toml import load_run
from meshtrain.errors import ConfigError, TrainingStopped
from meshtrain.planning.machine import find_machine
from meshtrain.profiling.comparison import Measurement, comparison_lines, prediction_lines
from meshtrain.profiling.files import Prediction, prediction_path, read_prediction
from meshtrain.profiling.known_machine import known_machine
from meshtrain.profiling.prediction import _for_json, _key
from meshtrain.profiling.prediction_hook import PredictionHook
from meshtrain.profiling.report.comparison import comparison
from meshtrain.profiling.report.page import report_page
from meshtrain.profiling.report.recorded import read_run_directory
from meshtrain.training.distillation.teacher import Teacher
from meshtrain.training.hooks import Hook, Metrics, RunState
from meshtrain.training.resolve import ResolvedRun, resolve_run
from meshtrain.training.run import train_run
from tests.planning.cases import MODELS, PLANS, make_run
from tests.profiling.directories import prediction, summary
from tests.ranks import run_on_ranks
from tests.training.runs import (
    LLAMA_TEXT,
    RUN_TEXT,
    VOCABULARY,
    build_plan,
    build_run,
    poison_gradient,
    steps_of,
    write_text,
)

SIMULATING = "Simulating a step on machine.toml, to predict its memory and its time"
PREDICTED = r"Predicted for machine\.toml: peak 0\.\d{4} of 2\.00 GiB"
MEMORY = 'memory_gib = {memory}\nreserved_gib = 0.0\nfragmentation = 0.0\nsource = "a test"\n'
# A step takes far longer than on any machine, so that the prediction is wrong.
SPEED = """
[speed]
processes_per_host = 2
is_asynchronous = false
operator_seconds = 1.0
hook_seconds = 0.0
peak_tflops = { float64 = 1.0 }
matmul_efficiency = [[1e6, 0.5]]
attention_efficiency = [[1e6, 0.5]]
memory_gb_per_second = [[1e6, 10]]
host_memory_gb_per_second = 10
host_link_gb_per_second = 10
within_host = { gb_per_second = 1, seconds = 1e-4 }
between_hosts = { gb_per_second = 1, seconds = 1e-4 }
"""


def machine_file(directory: Path, *, memory: float = 2.0, speed: str = SPEED) -> str:
    file = directory / "machine.toml"
    file.write_text(MEMORY.format(memory=memory) + speed)
    return str(file)


def test_whatever_decides_a_prediction_is_in_its_key(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TEXT + LLAMA_TEXT)
    machine = find_machine(machine_file(tmp_path), 2)
    changes = [
        [],
        ["ema.decay=0.99"],
        ["objective.label_smoothing=0.1"],
        ["global_batch_size=16"],
        ["optimizer.name='lion'"],
        ["objective.z_loss=0.1"],
    ]
    runs = [resolve_run(load_run(tmp_path / "run.toml", it), 2) for it in changes]
    keys = [_key(run, machine) for run in runs]
    assert len(set(keys)) == len(changes)
    assert keys[0] == _key(resolve_run(load_run(tmp_path / "run.toml", []), 2), machine)


def test_every_setting_of_a_simulation_is_in_its_key() -> None:
    run = make_run("llama", PLANS["fsdp"])
    changes: list[dict[str, Any]] = [
        {"attention": "eager"},
        {"trust_remote_code": not run.trust_remote_code},
        {"inputs": ("position_ids",)},
        {"router": RouterConfig(z_loss=0.1)},
        {"lora": LoraConfig(rank=8)},
        {"preference": PreferenceConfig(loss="dpo")},
        {"has_weights": True},
        {"teacher": Teacher(DistillationConfig(teacher="one"), run.hf_config, "sdpa", run.plan)},
        {"teacher": Teacher(DistillationConfig(teacher="one"), run.hf_config, "eager", run.plan)},
        {"on_gpus": True},
        {"layers": (0,)},
    ]
    # What JSON cannot hold would raise.
    found = {json.dumps(_for_json(replace(run, **it))) for it in ({}, *changes)}
    assert len(found) == len(changes) + 1


def train_here(*configs: RunConfig, hooks: tuple[Hook, ...] = ()) -> list[str]:
    """Train on this rank, one run after another; return what each printed, and why it stopped."""
    shown = []
    for config in configs:
        with redirect_stdout(StringIO()) as printed:
            try:
                train(config, hooks)
                shown.append(printed.getvalue())
            except TrainingStopped as stopped:
                shown.append(f"{printed.getvalue()}{stopped}")
    return shown


def one_process(directory: Path, **changes: Any) -> RunConfig:
    return build_run(directory, "gpt2", build_plan((1, 1, 1, 1)), **changes)


def rows_of(directory: Path) -> dict[str, tuple[str, ...]]:
    """Return the rows of predicted against measured in the report of a run."""
    (table,) = [one for one in comparison(read_run_directory(directory)) if one.title.startswith("Predicted for")]
    return {row[0]: row[1:] for row in table.rows}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[Prediction]]:
    """Return the folder of runs of two processes, what they printed, and their predictions."""
    folder = tmp_path_factory.mktemp("real")
    config = build_run(folder / "out", "gpt2-dropout", build_plan((2, 1, 1, 1)), machine=machine_file(folder))
    config = config.model_copy(update={"steps": 8, "profile": ProfileConfig(steps=[3, 4])})
    plain = config.model_copy(update={"run_directory": str(folder / "plain"), "machine": None})
    shown = run_on_ranks(2, train_here, config, plain, joins=False)[0]
    found = [read_prediction(folder / "out")]
    later = [
        config.model_copy(update={"steps": 9}),
        config.model_copy(
            update={"steps": 16, "plan": config.plan.model_copy(update={"recompute": RecomputePlan(mode="full")})}
        ),
    ]
    for one in later:
        shown += run_on_ranks(2, train_here, one, joins=False)[0]
        found.append(read_prediction(folder / "out"))
    predictions = [one for one in found if one is not None]
    assert len(predictions) == 3
    return folder, shown, predictions


def test_run_shows_what_is_predicted_and_what_was_measured(real: tuple[Path, list[str], list[Prediction]]) -> None:
    folder, (shown, plain, *_), (found, *_) = real
    lines = shown.splitlines()
    assert lines[0] == SIMULATING
    assert found.step_seconds is not None
    assert found.step_seconds > 100
    assert lines[1].startswith(f"Predicted for machine.toml: peak {max(found.peak_bytes) / 2**30:.4f} of 2.00 GiB, ")
    assert re.fullmatch(
        PREDICTED + r", a step [\d,]+ s, \d tokens per second and process \(constants assumed, not measured\)", lines[1]
    )
    (step,) = [line for line in lines if line.startswith("Step: ")]
    assert re.fullmatch(
        r"Step: predicted [\d,]+ s, measured 0\.\d+ s \(-\d+\.\d%\); the prediction is off by more than 10%", step
    )
    (memory,) = [line for line in lines if line.startswith("Peak memory: ")]
    assert re.match(r"Peak memory: predicted 0\.\d{4} GiB, measured 0\.\d{4} GiB \([-+]", memory)
    assert "predict" not in plain.lower()
    assert not prediction_path(folder / "plain").exists()


def test_simulation_changes_no_result(real: tuple[Path, list[str], list[Prediction]]) -> None:
    folder = real[0]
    ours, theirs = [
        [(step["loss"], step["grad_norm"]) for step in steps_of(folder / name)[:8]] for name in ("out", "plain")
    ]
    assert ours == theirs


def test_prediction_is_read_again_unless_the_plan_changes(real: tuple[Path, list[str], list[Prediction]]) -> None:
    _, (first, _, again, changed), (found, same, other) = real
    assert SIMULATING not in again
    assert again.splitlines()[0] == first.splitlines()[1]
    assert same == found
    # Only one more step was done.
    assert "Step: predicted" not in again
    assert changed.splitlines()[0] == SIMULATING
    assert other.peak_bytes != found.peak_bytes
    assert "Step: predicted" in changed


def test_prediction_of_an_earlier_start_is_removed_if_nothing_is_predicted(tmp_path: Path) -> None:
    config = one_process(tmp_path / "out", machine=machine_file(tmp_path))
    run_on_ranks(1, train_here, config, joins=False)
    assert prediction_path(tmp_path / "out").exists()
    later = config.model_copy(update={"machine": "none", "steps": config.steps + 1})
    run_on_ranks(1, train_here, later, joins=False)
    assert not prediction_path(tmp_path / "out").exists()


def test_prediction_that_cannot_be_removed_stops_the_training(tmp_path: Path) -> None:
    config = one_process(tmp_path / "out", machine="none")
    (prediction_path(tmp_path / "out") / "a folder").mkdir(parents=True)
    (told,) = run_on_ranks(1, train_here, config, joins=False)[0]
    assert told.endswith(
        f"cannot remove {tmp_path}/out/prediction.json, the prediction of an earlier start: Is a directory; remove it, "
        "then start the run again"
    )


def test_report_shows_predicted_against_measured(real: tuple[Path, list[str], list[Prediction]]) -> None:
    directory = real[0] / "out"
    rows = rows_of(directory)
    assert rows.keys() >= {"time of a step", "peak memory, pp rank 0", "peak memory, pp rank 1", "messages over pp"}
    assert all(len(rows[name]) == 3 and all(rows[name]) for name in ("time of a step", "peak memory, pp rank 1"))
    page = report_page(read_run_directory(directory))
    assert "Predicted for machine.toml (assumed rates), and measured" in page
    assert "Predicted and measured" in page


class Stopping(Hook):
    """Asks to stop after a step."""

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        if state.step == 7:
            state.request_stop()


def train_to_a_stop(config: RunConfig) -> str:
    return train_here(config, hooks=(Stopping(),))[0]


def train_to_a_failure(config: RunConfig) -> str:
    poison_gradient(9)
    return train_here(config)[0]


def test_end_is_compared_after_a_stop_but_not_after_a_failure(tmp_path: Path) -> None:
    machine = machine_file(tmp_path)
    configs = [one_process(tmp_path / name, machine=machine, steps=12) for name in ("stopped", "failed")]
    (stopped,) = run_on_ranks(1, train_to_a_stop, configs[0], joins=False)
    assert len(steps_of(tmp_path / "stopped")) == 8
    assert "Step: predicted" in stopped
    assert (
        "not measured: on a CPU the memory of the process is not that of its tensors, and only profile.steps measures "
        "that\n" in stopped
    )
    # It is not compared with the memory of the process.
    assert rows_of(tmp_path / "stopped")["peak memory"][1:] == ("", "")
    (failed,) = run_on_ranks(1, train_to_a_failure, configs[1], joins=False)
    assert len(steps_of(tmp_path / "failed")) >= 8
    assert "step 9" in failed
    assert "Predicted for" in failed
    assert "Step: predicted" not in failed


def test_run_that_does_not_fit_says_so_and_trains(tmp_path: Path) -> None:
    config = one_process(tmp_path / "out", machine=machine_file(tmp_path, memory=0.0001, speed=""))
    blocked = one_process(tmp_path / "blocked", machine=config.machine)
    (prediction_path(tmp_path / "blocked") / "a folder").mkdir(parents=True)
    shown, stopped = run_on_ranks(1, train_here, config, blocked, joins=False)[0]
    _, line, verdict, *_ = shown.splitlines()
    assert re.fullmatch(
        r"Predicted for machine\.toml: peak 0\.\d{4} of 0\.0001 GiB \(constants assumed, not measured\)", line
    )
    assert re.fullmatch(
        r"It does not fit .+machine\.toml: rank 0 needs 0\.\d{4} GiB more\. The largest part is \w+, 0\.\d{4} GiB\. "
        r"Training starts anyway\.",
        verdict,
    )
    assert len(steps_of(tmp_path / "out")) == 6
    # Too few steps.
    assert "Peak memory: predicted" not in shown
    assert {name: len(row) for name, row in rows_of(tmp_path / "out").items()} == {"peak memory": 3}
    assert stopped.endswith(
        f"cannot write {tmp_path}/blocked/prediction.json: Is a directory, so training stopped; free disk space, or "
        'set machine = "none", then start the run again; it resumes from its newest checkpoint'
    )


def train_with_a_loop_over_experts(config: RunConfig) -> str:
    hook = PredictionHook(str(config.machine))

    def predict(resolved: ResolvedRun) -> None:
        for own in (resolved.hf_config, resolved.model.config):
            own._experts_implementation = "eager"
        hook.predict(resolved)

    with redirect_stdout(StringIO()) as printed:
        train_run(config, [hook], predict)
    return printed.getvalue()


def test_model_that_cannot_be_simulated_trains(tmp_path: Path) -> None:
    model = ModelConfig(type="mixtral", config={**MODELS["mixtral"], "vocab_size": VOCABULARY})
    config = one_process(tmp_path / "out", machine=machine_file(tmp_path), steps=2)
    config = config.model_copy(update={"model": model})
    (tmp_path / "out").mkdir()
    prediction_path(tmp_path / "out").write_text(json.dumps(prediction().to_json()))
    reason = (
        "Memory and time of a step are not predicted: the step of a mixtral cannot be simulated: aten.nonzero.default "
        "needs values, which are not known before a run"
    )
    (shown,) = run_on_ranks(1, train_with_a_loop_over_experts, config, joins=False)
    assert shown.splitlines()[:2] == [SIMULATING, reason]
    assert len(steps_of(tmp_path / "out")) == 2
    # It was that of another plan.
    assert not prediction_path(tmp_path / "out").exists()
    (again,) = run_on_ranks(1, train_with_a_loop_over_experts, config, joins=False)
    assert again.splitlines()[0] == reason


@pytest.mark.parametrize("command", [["check", "--world-size", "1"], ["train", "--processes", "2"], ["train"]])
@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ("h100-80g", "machine = h100-80g: there is no such description; did you mean 'h100-80gb'?"),
        ("wrong.toml", "wrong.toml: memory_gib: missing"),
        ("missing.toml", "no file '"),
    ],
)
def test_wrong_machine_is_one_line_before_anything_is_launched(
    command: list[str], machine: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "run.toml").write_text(f'machine = "{machine}"\n{RUN_TEXT}\n{LLAMA_TEXT}')
    (tmp_path / "wrong.toml").write_text('reserved_gib = 1.0\nfragmentation = 0.0\nsource = "x"\n')
    name, *options = command
    assert cli._exit_code([name, str(tmp_path / "run.toml"), *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_machine_file_is_relative_to_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'machine = "machines/mine.toml"\n{RUN_TEXT}\n{LLAMA_TEXT}')
    assert load_run(tmp_path / "run.toml").machine == str(tmp_path / "machines" / "mine.toml")
    for name in ("h100-80gb", "cpu", "none"):
        assert load_run(tmp_path / "run.toml", [f"machine={name}"]).machine == name


def test_gpu_of_a_run_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = one_process(tmp_path / "out")
    assert known_machine(config) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert known_machine(config) == "h100-80gb"
    assert known_machine(config.model_copy(update={"machine": "none"})) is None
    assert known_machine(config.model_copy(update={"machine": "l40s-48gb"})) == "l40s-48gb"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert known_machine(config) is None
    with pytest.raises(ConfigError, match=r"^machine = h100: there is no such description; did you mean"):
        train(config.model_copy(update={"machine": "h100"}))


def test_simulation_is_not_loaded_if_no_machine_is_known(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"{RUN_TEXT}\n{LLAMA_TEXT}")
    program = (
        "import sys; from meshtrain.api import train; from meshtrain.config.toml import load_run; "
        f"config = load_run({str(tmp_path / 'run.toml')!r}); "
        "assert train._prediction_hooks(config) == [] == train._profile_hooks(config); print(*sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name for name in shown.stdout.split() if name.startswith("meshtrain.planning")}
    assert loaded == {"meshtrain.planning", "meshtrain.planning.machine"}


def test_lines_leave_out_what_is_not_known() -> None:
    unknown = {"step_seconds": None, "tokens_per_second": None, "mfu": None, "bubble": None, "measured": True}
    found = Prediction.from_json(prediction().to_json() | unknown)
    assert prediction_lines(found) == ["Predicted for h100-80gb: peak 68.00 of 79.00 GiB"]
    assert prediction_lines(prediction()) == [
        "Predicted for h100-80gb: peak 68.00 of 79.00 GiB, a step 0.75 s, 11,000 tokens per second and process "
        "(constants assumed, not measured)"
    ]
    peak = max(rank.peak_bytes for rank in summary().ranks)
    assert comparison_lines(step_seconds=None, peak_bytes=68 * 2**30, measured=Measurement(0.1, peak)) == [
        "Peak memory: predicted 68.00 GiB, measured 69.00 GiB (+1.5%)"
    ]
