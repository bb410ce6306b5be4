"""The average of the weights is that of one process on every mesh, and is saved and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from meshtrain import cli
from meshtrain.checkpoint.storage.directory import find_checkpoint
from meshtrain.config.ema import EmaConfig
from meshtrain.config.plan import ShardPlan
from meshtrain.config.run import CheckpointConfig, EvaluationConfig, RunConfig
from meshtrain.config.toml import load_run
from meshtrain.errors import ConfigError
from meshtrain.parallel.account import account
from meshtrain.parallel.pipeline import full_tensor
from meshtrain.runtime.ranks import RankError
from meshtrain.training.hooks import Hook, Metrics, RunState
from meshtrain.training.resolve import resolve_run
from tests.ranks import run_on_ranks
from tests.training.runs import Mesh, build_plan, build_run, read_checkpoint, read_metrics, steps_of, train_here

DECAY = 0.7


class Weights(Hook):
    """Keeps the weights of each step, and those before the first one."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def on_start(self, state: RunState, metrics: Metrics) -> None:
        self._keep(state)

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        self._keep(state)

    def _keep(self, state: RunState) -> None:
        self.kept.append({name: full_tensor(p.detach()).clone() for name, p in state.model.named_parameters()})


def weights_of(run: RunConfig) -> list[dict[str, Tensor]]:
    hook = Weights()
    train_here(run, [hook])
    return hook.kept


def averaging(directory: Path, mesh: Mesh, **changes: Any) -> RunConfig:
    settings = {"ema": EmaConfig(decay=DECAY), "checkpoint": CheckpointConfig(every=1), **changes}
    return build_run(directory, "gpt2", build_plan(mesh), **settings)


def averages_in(directory: Path) -> dict[str, Tensor]:
    found = read_checkpoint(directory).items()
    return {key.removeprefix("ema."): tensor for key, tensor in found if key.startswith("ema.")}


@pytest.mark.parametrize("every", [1, 2])
def test_average_follows_its_formula(every: int, tmp_path: Path) -> None:
    run = averaging(
        tmp_path / "run", (1, 1, 1, 1), steps=4, checkpoint=CheckpointConfig(), ema=EmaConfig(decay=DECAY, every=every)
    )
    first, *later = run_on_ranks(1, weights_of, run, joins=False)[0]
    wanted = dict(first)
    for step, weights in enumerate(later, start=1):
        if step % every == 0:
            wanted = {name: DECAY * value + (1 - DECAY) * weights[name] for name, value in wanted.items()}
    found = averages_in(tmp_path / "run")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-15)


def test_average_is_the_same_after_resuming_on_other_meshes(tmp_path: Path) -> None:
    """The model has a tied weight, of which two stages have copies."""
    whole = averaging(tmp_path / "whole", (1, 1, 1, 1), steps=3)
    run_on_ranks(1, train_here, whole, joins=False)
    wanted = averages_in(tmp_path / "whole")
    for steps, mesh in enumerate(((1, 1, 2, 1), (2, 1, 1, 2), (1, 1, 1, 2)), start=1):
        run = averaging(tmp_path / "other", mesh, steps=steps)
        run_on_ranks(run.plan.mesh.world_size, train_here, run, joins=False)
    found = averages_in(tmp_path / "other")
    assert found.keys() == wanted.keys()
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-12)


def test_average_is_float32_beside_weights_in_bfloat16(tmp_path: Path) -> None:
    plan = build_plan((1, 1, 1, 1))
    precision = {"parameters": "bfloat16", "compute": "bfloat16", "reduce": "float32"}
    plan = plan.model_copy(update={"precision": plan.precision.model_copy(update=precision)})
    run = averaging(tmp_path / "run", (1, 1, 1, 1), steps=2).model_copy(update={"plan": plan})
    run_on_ranks(1, train_here, run, joins=False)
    assert {tensor.dtype for tensor in averages_in(tmp_path / "run").values()} == {torch.float32}


def test_export_writes_the_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = averaging(tmp_path / "run", (1, 1, 1, 1), steps=1)
    run_on_ranks(1, train_here, run, joins=False)
    for name, options in (("plain", []), ("average", ["--ema"])):
        assert cli._exit_code(["export", str(tmp_path / "run"), str(tmp_path / name), *options]) == 0
    assert "GPT2LMHeadModel, the average of its weights, of step 1" in capsys.readouterr().out
    found = averages_in(tmp_path / "run")
    plain, average = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64) for name in ("plain", "average")
    )
    name = "transformer.wte.weight"
    assert torch.equal(average.get_parameter(name).data, found[name].to(average.dtype))
    assert not torch.equal(average.get_parameter(name), plain.get_parameter(name))


def test_export_without_an_average_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = build_run(tmp_path / "run", "gpt2", build_plan((1, 1, 1, 1)), steps=1)
    run_on_ranks(1, train_here, run, joins=False)
    assert cli._exit_code(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--ema"]) == 2
    checkpoint = find_checkpoint(tmp_path / "run")
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.endswith("has no average of the weights; leave --ema out, or train with ema.decay")
    assert checkpoint.name in shown
    assert not (tmp_path / "out").exists()


def test_average_is_evaluated_on_every_mesh_and_the_weights_stay(tmp_path: Path) -> None:
    """At level 2, parameters stay gathered after a forward pass."""
    found, losses = {}, {}
    one, two = (1, 1, 1, 1), (1, 1, 2, 1)
    for name, mesh, evaluates in (("one", one, True), ("two", two, True), ("off", two, False)):
        ema = EmaConfig(decay=DECAY, evaluate=evaluates)
        run = averaging(tmp_path / name, mesh, steps=2, ema=ema, evaluation=EvaluationConfig(every=1))
        plan = run.plan.model_copy(update={"shard": ShardPlan(level=2 if mesh[2] > 1 else 3)})
        data = run.data.model_copy(update={"validation": 0.2})
        run_on_ranks(mesh[2], train_here, run.model_copy(update={"data": data, "plan": plan}), joins=False)
        found[name] = [it for it in read_metrics(tmp_path / name) if "eval_loss" in it]
        losses[name] = [it["loss"] for it in steps_of(tmp_path / name)]
    assert losses["one"] == pytest.approx(losses["two"], rel=1e-12)
    assert losses["two"] == losses["off"]
    assert [it["eval_loss"] for it in found["two"]] == [it["eval_loss"] for it in found["off"]]
    assert not any("eval_loss_ema" in it for it in found["off"])
    wanted = [it["eval_loss_ema"] for it in found["one"]]
    assert [it["eval_loss_ema"] for it in found["two"]] == pytest.approx(wanted, rel=1e-12)
    # The average is behind, so its loss is higher while the loss falls.
    assert all(it["eval_loss_ema"] > it["eval_loss"] for it in found["one"])


def test_mistakes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('run_directory = "out"\nsteps = 1\nglobal_batch_size = 8\nmodel.type = "gpt2"\n')
    for override, message in (
        ("ema.decay=1.0", "ema.decay: expected a number above 0 below 1, found 1.0"),
        ("ema.every=2", "`every` is not read without `decay`; set `decay`, or leave it out"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_run(path, [override])
        assert message in str(caught.value)
    run = averaging(tmp_path / "run", (1, 1, 1, 1), steps=1)
    run_on_ranks(1, train_here, run, joins=False)
    other = run.model_copy(update={"ema": EmaConfig(), "steps": 2})
    with pytest.raises(RankError) as refused:
        run_on_ranks(1, train_here, other, joins=False)
    assert "ema.decay is 0.7 in that file and not set in this run" in str(refused.value.original)


def test_average_is_counted_in_the_memory_of_a_plan(tmp_path: Path) -> None:
    plain, averaged = (
        resolve_run(averaging(tmp_path / "run", (1, 1, 1, 1), ema=ema), 1)
        for ema in (EmaConfig(), EmaConfig(decay=0.9))
    )
    (without,) = account(plain.model, plain.plan, plain.config.kept_bytes)
    (found,) = account(averaged.model, averaged.plan, averaged.config.kept_bytes)
    # Parameters are float64 here, and so is their average.
    assert found.optimizer_bytes - without.optimizer_bytes == 8 * without.num_local_parameters
