"""A run whose first batches are smaller: the same on every mesh, and after it is resumed."""

import re
from pathlib import Path
from typing import Any

import pytest

from meshtrain.config.batch_ramp import BatchRampConfig
from meshtrain.config.run import CheckpointConfig, RunConfig
from meshtrain.errors import CheckpointError, PlanError
from meshtrain.runtime.ranks import RankError
from meshtrain.training.resolve import resolve_run
from tests.ranks import run_on_ranks
from tests.training.runs import MODELS, SEQUENCE, Mesh, build_plan, build_run, samples_seen, steps_of, train_here

RAMP = BatchRampConfig(first=4, steps=2)
SIZES = [4, 4, 8, 8]


def ramped(directory: Path, mesh: Mesh = (1, 1, 1, 1), **changes: Any) -> RunConfig:
    settings = {"batch_ramp": RAMP, "steps": len(SIZES), "checkpoint": CheckpointConfig(every=1), **changes}
    return build_run(directory, "qwen3", build_plan(mesh), **settings)


def train(run: RunConfig) -> dict[int, tuple[list[int], list[list[int]]]]:
    return samples_seen(run_on_ranks(run.plan.mesh.world_size, train_here, run, joins=False))


def test_batches_grow_on_every_mesh_and_after_resuming(tmp_path: Path) -> None:
    wanted = train(ramped(tmp_path / "whole"))
    assert [len(ids) for ids, _ in wanted.values()] == SIZES
    found = {}
    for steps, mesh in enumerate(((1, 1, 2, 1), (2, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1)), start=1):
        found |= train(ramped(tmp_path / "other", mesh, steps=steps))
    assert found == wanted
    whole, other = (steps_of(tmp_path / name) for name in ("whole", "other"))
    for key in ("loss", "grad_norm"):
        assert [it[key] for it in other] == pytest.approx([it[key] for it in whole], rel=1e-12)
    for metrics in (whole, other):
        assert [it["batch_size"] for it in metrics] == SIZES
        assert [it["tokens"] for it in metrics] == [sum(SIZES[: step + 1]) * SEQUENCE for step in range(4)]


def test_run_with_another_ramp_is_not_resumed(tmp_path: Path) -> None:
    train(ramped(tmp_path / "run", steps=1))
    # The settings that it started with are compared first.
    (tmp_path / "run" / "run.toml").unlink()
    with pytest.raises(RankError) as caught:
        train(ramped(tmp_path / "run", batch_ramp=BatchRampConfig(first=4, steps=3)))
    assert isinstance(caught.value.original, CheckpointError)
    assert "batch_ramp.steps is 2 in the checkpoint and 3 in this run" in str(caught.value.original)


@pytest.mark.parametrize(
    ("ramp", "mesh", "message"),
    [
        (
            {"first": 2, "steps": 3},
            (1, 1, 2, 1),
            "batch_ramp has a batch of 2 sequences, which is not a multiple of dp 2 x micro_batch_size 2 = 4; set "
            "first and increment of batch_ramp to multiples of it",
        ),
        (
            {"first": 2, "steps": 3},
            (2, 1, 1, 1),
            "batch_ramp has a batch of 2 sequences: pipeline.schedule = '1F1B' needs at least as many microbatches as "
            "stages: found 1 for 2 stages; set first and increment of batch_ramp to larger numbers",
        ),
    ],
)
def test_batch_that_a_plan_cannot_compute_is_refused(
    ramp: dict[str, int], mesh: Mesh, message: str, tmp_path: Path
) -> None:
    run = build_run(tmp_path / "run", "qwen3", build_plan(mesh), batch_ramp=BatchRampConfig(**ramp))
    with pytest.raises(PlanError) as caught:
        resolve_run(run)
    assert message in caught.value.lines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_ramp": {"steps": 5}}, "`steps` is not read without `first`; set `first`, or leave it out"),
        ({"batch_ramp": {"first": 2}}, "`first` is set, and `steps` is not; set it to the length of the ramp"),
        (
            {"batch_ramp": {"first": 3, "steps": 5}},
            "`batch_ramp` grows from 3 by 3, which does not lead to `global_batch_size` = 8; choose another `first` or "
            "`increment`",
        ),
        (
            {"batch_ramp": {"first": 8, "steps": 5}},
            "`batch_ramp` grows from 8 by 8, which does not lead to `global_batch_size` = 8; choose another `first` or "
            "`increment`",
        ),
        (
            {"batch_ramp": {"first": 2, "steps": 2}},
            "`batch_ramp` has 3 sizes below `global_batch_size`, and only 2 steps; raise `steps` or `increment`",
        ),
        (
            {"batch_ramp": {"first": 4, "steps": 2}, "steps": None, "epochs": 1},
            "`epochs` = 1 counts steps of one size, and `batch_ramp` has several; leave out one of them and set "
            "`steps`",
        ),
        (
            {
                "batch_ramp": {"first": 4, "steps": 2},
                "data": {"form": "padded", "pad_to_multiple_of": 8, "group_by_length": 4},
            },
            "`data.group_by_length` = 4 counts steps of one size, and `batch_ramp` has several; leave out one of them",
        ),
    ],
)
def test_ramp_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    table = {"run_directory": "out", "steps": 9, "global_batch_size": 8, "model": MODELS["qwen3"].model_dump()}
    with pytest.raises(ValueError, match=re.escape(message)):
        RunConfig.model_validate(table | changes)
