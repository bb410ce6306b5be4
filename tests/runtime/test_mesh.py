"""All processes share one coordinate system."""

import torch
import torch.distributed as dist

from meshtrain.config.mesh import DATA_AXES, MeshPlan
from meshtrain.runtime.mesh import all_reduce_over, axis_rank, axis_size, data_rank, init_mesh
from meshtrain.runtime.mesh import new_group_along as new_group
from tests.ranks import run_on_ranks


def coordinates() -> tuple[int, int, int, int, int]:
    mesh = init_mesh(MeshPlan(pp=2, dp_replicate=2, dp_shard=1, tp=2), "cpu")
    assert axis_size(mesh, *DATA_AXES) == 2
    return (*(axis_rank(mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp")), data_rank(mesh))


def sums() -> tuple[float, list[int] | None, list[int] | None]:
    mesh = init_mesh(MeshPlan(pp=4, dp_replicate=1, dp_shard=1, tp=2), "cpu")
    total = all_reduce_over(torch.tensor(float(dist.get_rank())), mesh, ["pp"]).item()
    groups = [new_group(mesh, "pp"), new_group(mesh, "pp", [0, 3])]
    peers = [None if group is None else dist.get_process_group_ranks(group) for group in groups]
    return total, peers[0], peers[1]


def test_tp_is_the_innermost_and_pp_the_outermost_axis() -> None:
    expected = [(pp, replicate, 0, tp, replicate) for pp in (0, 1) for replicate in (0, 1) for tp in (0, 1)]
    assert run_on_ranks(8, coordinates) == expected


def test_sums_and_groups_along_an_axis() -> None:
    answers = run_on_ranks(8, sums)
    even, odd = [0, 2, 4, 6], [1, 3, 5, 7]
    assert answers[0] == (12.0, even, [0, 6])
    assert answers[3] == (16.0, odd, None)
    assert answers[7] == (16.0, odd, [1, 7])
