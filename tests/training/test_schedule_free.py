"""Schedule-free AdamW evaluates and saves the average of the weights, and trains on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.checkpoint.storage.directory import find_checkpoint
from meshtrain.config.ema import EmaConfig
from meshtrain.config.optimizer import LearningRateConfig, OptimizerConfig
from meshtrain.config.run import EvaluationConfig, ModelConfig, RunConfig
from tests.ranks import run_on_ranks
from tests.training.runs import (
    MODELS,
    Mesh,
    build_plan,
    build_run,
    read_checkpoint,
    read_metrics,
    steps_of,
    train_here,
)

ONE: Mesh = (1, 1, 1, 1)
OPTIMIZER = OptimizerConfig(name="adamw-schedule-free", learning_rate=1e-2, beta1=0.8, epsilon=1e-4)


def schedule_free(
    directory: Path, mesh: Mesh = ONE, *, model: ModelConfig = MODELS["qwen3"], **changes: Any
) -> RunConfig:
    rate = LearningRateConfig(name="constant_with_warmup", warmup_steps=2)
    settings = {"optimizer": OPTIMIZER, "learning_rate": rate, "steps": 4, **changes}
    run = build_run(directory, "qwen3", build_plan(mesh), **settings)
    data = run.data.model_copy(update={"validation": 0.2})
    return run.model_copy(update={"data": data, "model": model})


def train(run: RunConfig) -> None:
    run_on_ranks(run.plan.mesh.world_size, train_here, run, joins=False)


def evaluation_losses(directory: Path) -> list[float]:
    return [it["eval_loss"] for it in read_metrics(directory) if "eval_loss" in it]


def test_checkpoint_holds_the_average_that_was_evaluated(tmp_path: Path) -> None:
    train(schedule_free(tmp_path / "run"))
    found = read_checkpoint(tmp_path / "run")
    name = "model.embed_tokens.weight"
    average, trained, stepped = (found[f"{it}.{name}"] for it in ("model", "optimizer.trained", "optimizer.z"))
    torch.testing.assert_close(trained, 0.8 * average + 0.2 * stepped, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(average, trained)
    # A run that begins with these weights, and takes a step of no length.
    model = ModelConfig(path=str(find_checkpoint(tmp_path / "run")), weights="pretrained")
    still = OptimizerConfig(name="sgd", learning_rate=1e-30)
    run = schedule_free(tmp_path / "next", model=model, optimizer=still, steps=1)
    train(run)
    assert evaluation_losses(tmp_path / "next") == pytest.approx(evaluation_losses(tmp_path / "run"), rel=1e-12)


def test_evaluations_and_checkpoints_change_nothing_on_any_mesh(tmp_path: Path) -> None:
    train(schedule_free(tmp_path / "plain"))
    wanted = steps_of(tmp_path / "plain")
    last = evaluation_losses(tmp_path / "plain")
    for steps, mesh in enumerate((ONE, (1, 1, 2, 1), (2, 1, 1, 1), (1, 1, 1, 2)), start=1):
        train(schedule_free(tmp_path / "other", mesh, steps=steps, evaluation=EvaluationConfig(every=1)))
    found = steps_of(tmp_path / "other")
    assert [it["loss"] for it in found] == pytest.approx([it["loss"] for it in wanted], rel=1e-12)
    assert evaluation_losses(tmp_path / "other")[-1:] == pytest.approx(last, rel=1e-12)


def test_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    train(schedule_free(tmp_path / "whole"))
    for steps in (2, 4):
        train(schedule_free(tmp_path / "parts", steps=steps))
    whole, parts = (read_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert torch.equal(parts[name], value), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"learning_rate": {"name": "cosine"}},
            "`learning_rate.name` = 'cosine', and the optimizer 'adamw-schedule-free' replaces a schedule by its "
            'average; set `learning_rate.name` = "constant_with_warmup" and `learning_rate.warmup_steps`',
        ),
        (
            {"ema": EmaConfig(decay=0.9).model_dump()},
            "`ema.decay` averages the weights, as the optimizer 'adamw-schedule-free' does itself; leave out one of "
            "them",
        ),
    ],
)
def test_second_average_or_schedule_is_refused(changes: dict[str, Any], message: str) -> None:
    table = {
        "run_directory": "out",
        "steps": 1,
        "global_batch_size": 2,
        "model": MODELS["qwen3"].model_dump(),
        "optimizer": {"name": "adamw-schedule-free"},
        "learning_rate": {"name": "constant"},
    }
    assert RunConfig.model_validate(table)
    with pytest.raises(ValueError, match="`") as caught:
        RunConfig.model_validate(table | changes)
    assert message in str(caught.value)
