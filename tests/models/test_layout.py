"""The indices of the local part of a tensor, against torch's own tensor parallelism and FSDP2."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from meshtrain.models.layout import local_indices, local_ranges, local_tensor, ranges_at
from tests.ranks import run_on_ranks

# torch's arithmetic for _StridedShard gets 13 and 50257 (GPT-2's vocabulary) wrong over dp = 3 x tp
# = 2.
NUM_ROWS = (1, 3, 8, 13, 50257)


def compare_indices(dp: int, tp: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    module = nn.Module()
    for rows in NUM_ROWS:
        matrix = torch.stack([torch.arange(float(rows)), torch.full((rows,), -1.0)], dim=1)
        module.register_parameter(f"{rows}", nn.Parameter(distribute_tensor(matrix, mesh["tp"], [Shard(0)])))
    fully_shard(module, mesh=mesh["dp"])
    same = []
    for parameter in module.parameters():
        rows, columns = local_indices(parameter)
        same.append(torch.equal(local_tensor(parameter)[:, 0].long(), rows) and columns.tolist() == [0, 1])
        place = tuple(parameter.device_mesh.get_coordinate())
        same.append(
            [*ranges_at(parameter.shape, parameter.device_mesh, parameter.placements, place)] == local_ranges(parameter)
        )
        whole = [torch.arange(size) for size in parameter.shape]
        same.append(
            all(
                torch.equal(index[place], found)
                for index, place, found in zip(whole, local_ranges(parameter), (rows, columns), strict=True)
            )
        )
    return same


@pytest.mark.parametrize(("dp", "tp"), [(3, 2), (2, 3)])
def test_indices_match_the_rows_that_torch_put_on_each_rank(dp: int, tp: int) -> None:
    assert all(all(same) for same in run_on_ranks(dp * tp, compare_indices, dp, tp))


def test_plain_tensor_has_all_indices() -> None:
    assert [index.tolist() for index in local_indices(torch.zeros(2, 3))] == [[0, 1], [0, 1, 2]]
    assert local_ranges(torch.zeros(2, 0)) == [slice(0, 2), slice(0, 0)]
