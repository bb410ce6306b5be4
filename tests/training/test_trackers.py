"""Trackers: one run of each belongs to a run directory, and gets all metrics of metrics.jsonl."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from meshtrain.config.run import BadStepsConfig, LoggingConfig, RunConfig, TrackerName
from meshtrain.config.toml import dump_toml
from meshtrain.errors import ConfigError
from meshtrain.runtime.environment import variables_restored
from meshtrain.training.directory import check_directory
from meshtrain.training.hooks import Hook, Metrics, RunState
from meshtrain.training.metrics import grouped
from meshtrain.training.trackers import packages
from meshtrain.training.trackers.packages import check_trackers
from meshtrain.training.trackers.sender import Sender
from tests.ranks import RankError, run_on_ranks
from tests.training.runs import build_plan, build_run, poison_gradient, read_metrics, train_here
from tests.training.test_metrics import evaluated_run

BLOCK_BYTES, FILE_HEADER_BYTES, HEADER_BYTES = 32768, 7, 7
FULL, LAST = 1, 4
Points = dict[tuple[int, str], list[float]]
"""(step, name) -> values, in the order in which the tracker got them."""


class Fails(Hook):
    """Fails at a step, on all ranks."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        if state.step == self.step:
            raise RuntimeError("the fault of the test")


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables in the block."""
    with variables_restored(*values):
        os.environ.update(values)
        yield


def train_tracked(config: RunConfig, hooks: Sequence[Hook] = (), values: dict[str, str] | None = None) -> str:
    """Train on this rank without network, and return what it prints."""
    shown = StringIO()
    settings = {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true", **(values or {})}
    with variables(**settings), redirect_stdout(shown), redirect_stderr(shown):
        train_here(config, hooks)
    return shown.getvalue()


def tracked(config: RunConfig, *names: TrackerName) -> RunConfig:
    return config.model_copy(update={"logging": LoggingConfig(trackers=list(names))})


def small_run(directory: Path, *names: TrackerName, steps: int = 1) -> RunConfig:
    return tracked(build_run(directory, "gpt2", build_plan((1, 1, 1, 1)), steps=steps), *names)


def points_of_file(directory: Path) -> dict[tuple[int, str], float | None]:
    """Return the numbers of metrics.jsonl as a tracker names them."""
    lines = [line for line in read_metrics(directory) if not line.keys() & {"parameters_checksum", "bad_step"}]
    return {
        (int(line["step"]), grouped(name)): value
        for line in lines
        for name, value in line.items()
        if name not in ("step", "checkpoint")
    }


def check_all_there(found: Points, directory: Path, *, twice: set[int]) -> None:
    """Check that a tracker has what metrics.jsonl has; steps that were trained twice have two."""
    wanted = points_of_file(directory)
    assert found.keys() == wanted.keys()
    assert {key: values[-1] for key, values in found.items()} == wanted
    losses = {step: values for (step, name), values in found.items() if name == "train/loss"}
    assert {step for step, values in losses.items() if len(values) == 2} == twice
    assert all(value == pytest.approx(values[0], rel=1e-12) for values in losses.values() for value in values)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, str]:
    """Return a run that failed at step 5, and resumed from step 3; and what it printed then."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    directory = tmp_path_factory.mktemp("tracked") / "out"
    # Of several ranks the others are killed soon after the first has failed, and one of them may be
    # that which still closes its trackers.
    config = tracked(evaluated_run(directory, (1, 1, 1, 1)), "tensorboard", "wandb", "mlflow")
    with pytest.raises(RankError, match="the fault of the test"):
        run_on_ranks(1, train_tracked, config, [Fails(5)], joins=False)
    # Another mesh, so the plan that a tracker has must change too.
    changed = config.model_copy(update={"plan": build_plan((1, 1, 2, 1))})
    shown, _ = run_on_ranks(2, train_tracked, changed, joins=False)
    return changed, shown


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a file of W&B, a log as LevelDB writes it."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = file.read_bytes(), FILE_HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(content):
        if BLOCK_BYTES - position % BLOCK_BYTES < HEADER_BYTES:
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        position += HEADER_BYTES
        parts += content[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""


def test_wandb_has_one_run_with_all_metrics(resumed: tuple[RunConfig, str]) -> None:
    directory = Path(resumed[0].run_directory)
    files = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    found: Points = defaultdict(list)
    configs: list[dict[str, Any]] = []
    for file in files:
        kinds = [(record.WhichOneof("record_type"), record) for record in records(file)]
        (run,) = [record.run for kind, record in kinds if kind == "run"]
        assert run.run_id == json.loads((directory / "trackers.json").read_text())["wandb"]
        assert run.project == "meshtrain"
        configs.append({item.key: json.loads(item.value_json) for item in run.config.update})
        for row in (record.history for kind, record in kinds if kind == "history"):
            values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
            step = values.pop("step")
            for name, value in values.items():
                if not name.startswith("_"):
                    found[step, name].append(value)
    check_all_there(found, directory, twice={4, 5})
    assert [settings["plan"]["mesh"]["dp_shard"] for settings in configs] == [1, 2]
    assert [settings["global_batch_size"] for settings in configs] == [8, 8]


@contextmanager
def only_mlflow_run(directory: Path) -> Iterator[tuple[Any, Any]]:
    """Open the store of a run directory; yield its client, and the only run in it."""
    from mlflow import MlflowClient

    with variables(MLFLOW_ALLOW_FILE_STORE="true"):
        client = MlflowClient((directory / "mlflow").as_uri())
        (experiment,) = [found for found in client.search_experiments() if found.name == "meshtrain"]
        (run,) = client.search_runs([experiment.experiment_id])
        yield client, run


def mlflow_points(directory: Path) -> Points:
    """Return all points of the only run."""
    found: Points = defaultdict(list)
    with only_mlflow_run(directory) as (client, run):
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                found[metric.step, name].append(metric.value)
    return found


def test_mlflow_has_one_run_with_all_metrics(resumed: tuple[RunConfig, str]) -> None:
    check_all_there(mlflow_points(Path(resumed[0].run_directory)), Path(resumed[0].run_directory), twice={4, 5})


def test_mlflow_has_the_first_parameters_and_the_latest_files(resumed: tuple[RunConfig, str]) -> None:
    directory = Path(resumed[0].run_directory)
    with only_mlflow_run(directory) as (client, run):
        artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
        plan = Path(client.download_artifacts(run.info.run_id, "plan.toml")).read_text()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "out")
    assert run.info.run_id == json.loads((directory / "trackers.json").read_text())["mlflow"]
    assert run.data.params["global_batch_size"] == "8"
    assert run.data.params["plan.mesh.dp_shard"] == "1"
    assert artifacts == {"run.toml", "plan.toml"}
    assert plan == (directory / "plan.toml").read_text()
    assert "dp_shard = 2" in plan


def test_resumed_trackers_are_named_with_their_places(resumed: tuple[RunConfig, str]) -> None:
    directory = Path(resumed[0].run_directory)
    known = json.loads((directory / "trackers.json").read_text())
    lines = resumed[1].splitlines()
    for name in ("wandb", "mlflow"):
        assert f"Tracker {name}: run {known[name]} goes on at {directory}/{name}" in lines


def test_name_of_a_source_may_have_any_characters() -> None:
    pytest.importorskip("mlflow")
    from meshtrain.training.trackers.mlflow_run import _metric_name

    assert _metric_name("evaluation/eval_loss") == "evaluation/eval_loss"
    assert _metric_name("evaluation/eval_loss/web (en)/1") == "evaluation/eval_loss.web _en_.1"


def test_tracker_that_cannot_be_opened_stops_the_first_start_only(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    nowhere = {"MLFLOW_TRACKING_URI": "nowhere://"}
    with pytest.raises(RankError, match=r"logging\.trackers: mlflow: .*nowhere.*; check MLFLOW_TRACKING_URI"):
        run_on_ranks(1, train_tracked, small_run(tmp_path / "out", "mlflow"), (), nowhere, joins=False)
    assert not (tmp_path / "out" / "trackers.json").exists()
    run_on_ranks(1, train_tracked, small_run(tmp_path / "out", "mlflow"), joins=False)
    later = small_run(tmp_path / "out", "mlflow", steps=2)
    (shown,) = run_on_ranks(1, train_tracked, later, (), nowhere, joins=False)
    (warning,) = [line for line in shown.splitlines() if line.startswith("warning: ")]
    assert warning.startswith("warning: mlflow: ")
    assert warning.endswith("; training goes on without this tracker, and metrics.jsonl has all metrics")
    assert [line["step"] for line in read_metrics(tmp_path / "out") if "loss" in line] == [1, 2]


def train_poisoned(config: RunConfig) -> str:
    poison_gradient(5)
    return train_tracked(config)


def test_rewind_goes_on_in_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    config = small_run(tmp_path / "out", "mlflow", steps=6)
    config = config.model_copy(update={"bad_steps": BadStepsConfig(policy="rewind")})
    run_on_ranks(1, train_poisoned, config, joins=False)
    found = mlflow_points(tmp_path / "out")
    assert [len(found[step, "train/loss"]) for step in range(1, 7)] == [1, 1, 1, 2, 1, 1]
    check_all_there(found, tmp_path / "out", twice={4})


def test_missing_package_is_refused_before_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_trackers(small_run(tmp_path, "tensorboard", "wandb", "trackio"))
    assert caught.value.lines == (
        "logging.trackers: the tracker 'wandb' needs a package that is not installed; run pip install "
        '"meshtrain[wandb]"',
        "logging.trackers: the tracker 'trackio' needs a package that is not installed; run pip install "
        '"meshtrain[trackio]"',
    )
    monkeypatch.setenv("RANK", "1")
    check_trackers(small_run(tmp_path, "wandb"))


def test_folder_with_the_name_of_a_tracker_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somewhere").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not packages._is_installed("somewhere")
    assert packages._is_installed("tensorboard")


def test_run_directory_with_the_former_key_resumes(tmp_path: Path) -> None:
    config = small_run(tmp_path / "out", "tensorboard")
    (tmp_path / "out").mkdir()
    text = dump_toml(config).replace('trackers = [\n    "tensorboard",\n]', "tensorboard = true")
    assert "\ntensorboard = true" in text
    (tmp_path / "out" / "run.toml").write_text(text)
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    check_directory(config)


def test_damaged_identifiers_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trackers.json").write_text("[1]")
    with pytest.raises(RankError, match=r"trackers\.json is not an object of strings; correct it, or remove it"):
        run_on_ranks(1, train_tracked, small_run(tmp_path / "out", "mlflow"), joins=False)


class Server:
    """Takes points, except while it is down."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.is_down = False

    def send(self, points: Sequence[int]) -> None:
        if self.is_down:
            raise RuntimeError("no answer")
        assert len(points) <= 2
        self.got += points


def test_points_are_kept_until_the_server_answers() -> None:
    server, warnings, has_failed = Server(), [], Event()

    def warn(reason: str) -> None:
        warnings.append(reason)
        has_failed.set()

    server.is_down = True
    sender = Sender[int](server.send, warn, at_once=2)
    sender.add([1, 2, 3])
    assert has_failed.wait(5.0)
    sender.add([4])
    server.is_down = False
    sender.add([5])
    assert sender.close(5.0) == 0
    assert server.got == [1, 2, 3, 4, 5]
    assert warnings == ["no answer"]


def test_points_that_a_server_never_took_are_counted() -> None:
    server, warnings = Server(), []
    server.is_down = True
    sender = Sender[int](server.send, warnings.append, at_once=2)
    sender.add([1, 2, 3])
    sender.add([4])
    assert sender.close(5.0) == 4
    assert warnings == ["no answer"]
