"""Frozen groups of a run: their parameters stay as they are, and need no gradient and no state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshtrain.config.optimizer import GroupConfig, OptimizerConfig, OptimizerName
from meshtrain.config.run import RunConfig
from meshtrain.errors import ConfigError
from meshtrain.parallel.account import account
from meshtrain.training.parameter_groups import freeze
from meshtrain.training.report import plan_table
from meshtrain.training.resolve import resolve_run
from meshtrain.verify.case import Trace
from meshtrain.verify.parallel import train_pipeline
from meshtrain.verify.reference import copy_weights_into, train_model
from tests.casts import lift_float32_casts
from tests.parity import Case, _stock_model, assert_equal_to_reference, batches, build, fill, stock_weights
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, read_checkpoint
from tests.training.test_optimizers import plain_optimizer, train

PATTERNS = ["model.embed_tokens", "model.layers.1", "model.layers.*.self_attn.q_proj"]
FROZEN = GroupConfig(parameters=PATTERNS, frozen=True)
SHARED: dict[str, Any] = {"weight_decay": 0.1, "max_gradient_norm": 0.5, "epsilon": 1e-4}
CONFIGS = {
    "adamw": OptimizerConfig(learning_rate=1e-3, groups=[FROZEN], **SHARED),
    "muon": OptimizerConfig(name="muon", learning_rate=5e-3, groups=[FROZEN], **SHARED),
}
CASES = {
    2: [Case("llama-untied", mesh) for mesh in ((2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 2, 1, 1))],
    4: [Case("llama-untied", (2, 1, 1, 2))],
}


def is_frozen(name: str) -> bool:
    return name.startswith(("model.embed_tokens.", "model.layers.1.")) or ".q_proj." in name


def reference(names: list[OptimizerName]) -> list[Trace]:
    lift_float32_casts()
    # torch's Muon computes in bfloat16, in which rounding is larger than what is compared.
    Tensor.bfloat16 = Tensor.clone  # type: ignore[assignment,method-assign]
    found = []
    for name in names:
        model = _stock_model("llama-untied")
        copy_weights_into(model, stock_weights("llama-untied"))
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen(parameter_name))
        trained = [(own, it) for own, it in model.named_parameters() if it.requires_grad]
        alone = CONFIGS[name].model_copy(update={"groups": []})
        found.append(train_model(model, batches(), optimizer=plain_optimizer(trained, alone)))
    return found


def train_all(cases: list[Case], names: list[OptimizerName]) -> list[Trace]:
    lift_float32_casts()
    found = []
    for case in cases:
        for name in names:
            pipeline = build(case, change=lambda model, name=name: freeze(model, CONFIGS[name]))  # type: ignore[misc]
            fill(pipeline, stock_weights(case.model))
            found.append(train_pipeline(pipeline, batches(), CONFIGS[name]))
    return found


def test_every_mesh_trains_the_others_as_one_process_does() -> None:
    names = list(CONFIGS)
    (wanted,) = run_on_ranks(1, reference, names)
    for world_size, cases in CASES.items():
        answers = run_on_ranks(world_size, train_all, cases, names)
        for number in range(len(cases) * len(names)):
            assert_equal_to_reference([traces[number] for traces in answers], wanted[number % len(names)])


def run_with(directory: Path, groups: list[GroupConfig], **changes: Any) -> RunConfig:
    optimizer = OptimizerConfig(learning_rate=1e-3, epsilon=1e-4, groups=groups)
    return build_run(directory, "qwen3", build_plan((1, 1, 1, 1)), optimizer=optimizer, **changes)


def test_run_resumes_on_other_meshes_and_leaves_frozen_parameters(tmp_path: Path) -> None:
    wanted = train(run_with(tmp_path / "whole", [FROZEN], steps=2))
    begin: dict[str, Tensor] = {}
    for steps, mesh in enumerate(((1, 1, 2, 1), (2, 1, 1, 1)), start=1):
        run = run_with(tmp_path / "other", [FROZEN], steps=steps).model_copy(update={"plan": build_plan(mesh)})
        found = train(run)
        begin = begin or read_checkpoint(tmp_path / "other")
    assert found == pytest.approx(wanted, rel=1e-12)
    end = read_checkpoint(tmp_path / "other")
    weights = [name for name in end if name.startswith("model.")]
    unchanged = {name.removeprefix("model.") for name in weights if torch.equal(begin[name], end[name])}
    names = {name for name, _ in resolve_run(run).model.named_parameters()}
    assert unchanged == {name for name in names if is_frozen(name)}
    assert not [name for name in end if name.startswith("optimizer.") and is_frozen(name.split(".", 2)[2])]
    assert any(name.startswith("optimizer.exp_avg.model.layers.0.") for name in end)


def test_bytes_and_the_table_leave_frozen_parameters_out(tmp_path: Path) -> None:
    resolved = resolve_run(run_with(tmp_path / "run", [FROZEN]))
    (share,) = account(resolved.model, resolved.plan, resolved.config.kept_bytes)
    sizes = {name: it.numel() for name, it in resolved.model.named_parameters()}
    trained = sum(size for name, size in sizes.items() if not is_frozen(name))
    number = sum(sizes.values())
    found = share.parameter_bytes, share.gradient_bytes, share.optimizer_bytes
    assert found == (8 * number, 8 * trained, 16 * trained)
    assert dict(plan_table(resolved).rows)["model"].endswith(f"{number:,} parameters, of which {trained:,} train")


def test_run_in_which_nothing_trains_is_refused(tmp_path: Path) -> None:
    groups = [GroupConfig(parameters=["model"], frozen=True)]
    with pytest.raises(ConfigError) as caught:
        resolve_run(run_with(tmp_path / "run", groups))
    message = "optimizer.groups: every parameter is frozen, so there is nothing to train; leave one out"
    assert caught.value.lines == (message,)
