"""Shrinking keeps every axis of a mesh on at most 8 processes, and uneven plans uneven."""

import pytest

from meshtrain.config.mesh import AXES, MeshPlan
from meshtrain.config.plan import ParallelPlan, PipelinePlan
from meshtrain.verify.shrink import deepen, num_layers, shrink_mesh, shrink_plan

# pp, dp_replicate, dp_shard, ep, cp, tp
Degrees = tuple[int, int, int, int, int, int]


@pytest.mark.parametrize(
    ("mesh", "small"),
    [
        ((1, 1, 1, 1, 1, 1), [(1, 1, 1, 1, 1, 1)]),
        ((1, 1, -1, 1, 1, 1), [(1, 1, 2, 1, 1, 1)]),
        ((2, 1, -1, 1, 1, 2), [(2, 1, 2, 1, 1, 2)]),
        ((24, 1, 1, 1, 1, 4), [(2, 1, 1, 1, 1, 4)]),
        ((8, 1, 1, 1, 1, 1), [(8, 1, 1, 1, 1, 1)]),
        ((1, 1, 1, 1, 1, 8), [(1, 1, 1, 1, 1, 4)]),
        ((2, 1, 1, 1, 1, 3), [(2, 1, 1, 1, 1, 2)]),
        ((8, 2, 1, 1, 1, 1), [(4, 2, 1, 1, 1, 1)]),
        ((3, 1, 1, 1, 1, 2), [(3, 1, 1, 1, 1, 2)]),
        ((1, 1, 1000, 1, 1, 8), [(1, 1, 2, 1, 1, 4)]),
        ((1, 1, -1, 1, 4, 1), [(1, 1, 2, 1, 4, 1)]),
        ((1, 1, -1, 8, 1, 1), [(1, 1, 2, 4, 1, 1)]),
        ((1, 1, 1, 3, 1, 1), [(1, 1, 1, 2, 1, 1)]),
        ((4, 4, 4, 1, 1, 8), [(1, 2, 2, 1, 1, 2), (2, 1, 2, 1, 1, 2), (2, 2, 2, 1, 1, 1)]),
    ],
    ids=str,
)
def test_every_axis_is_kept(mesh: Degrees, small: list[Degrees]) -> None:
    shrunk = shrink_mesh(MeshPlan(**dict(zip(AXES, mesh, strict=True))))
    assert [tuple(getattr(found, axis) for axis in AXES) for found in shrunk] == small


@pytest.mark.parametrize(
    ("pipeline", "layers", "count"),
    [
        (PipelinePlan(), "balanced", 4),
        (PipelinePlan(layers_per_stage="even"), "even", 4),
        (PipelinePlan(layers_per_stage=[24, 24]), [1, 1], 2),
        (PipelinePlan(layers_per_stage=[30, 18]), [2, 1], 3),
        (PipelinePlan(layers_per_stage=[48, 0]), [2, 0], 2),
        (PipelinePlan(layers_per_stage=[9, 9, 9, 1]), [2, 1], 3),
        (PipelinePlan(split_at=["model.layers.30"]), [2, 1], 3),
    ],
    ids=str,
)
def test_uneven_layers_are_kept(pipeline: PipelinePlan, layers: str | list[int], count: int) -> None:
    plan = shrink_plan(ParallelPlan(pipeline=pipeline), MeshPlan(pp=2))
    assert (plan.pipeline.layers_per_stage, num_layers(plan)) == (layers, count)
    assert plan.precision.parameters == plan.precision.compute == "float64"


@pytest.mark.parametrize(
    ("layers", "counts", "last"),
    [
        ("balanced", [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], "balanced"),
        ([30, 18], [3, 6, 9, 12, 15], [10, 5]),
        ([48, 0], [2, 4, 6, 8, 10, 12, 14, 16], [16, 0]),
    ],
    ids=str,
)
def test_deeper_copies_keep_the_proportions(layers: str | list[int], counts: list[int], last: str | list[int]) -> None:
    shrunk = shrink_plan(ParallelPlan(pipeline=PipelinePlan(layers_per_stage=layers)), MeshPlan(pp=2))
    deeper = list(deepen(shrunk))
    assert [count for _, count in deeper] == counts
    assert deeper[0][0] == shrunk
    assert deeper[-1][0].pipeline.layers_per_stage == last
