"""The mesh: one coordinate system for all processes."""

import math
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshtrain.config.plan import AXES, MeshPlan

DATA_AXES = ("dp_replicate", "dp_shard")
# Along these, processes share a model: they need the same samples.
MODEL_AXES = ("pp", "tp")


def build_mesh(plan: MeshPlan, device_type: str) -> DeviceMesh:
    """Lay the processes out as (pp, dp_replicate, dp_shard, tp); axes of size 1 are kept.

    Args:
        plan: resolved degrees, whose product is the world size.
        device_type: "cpu" or "cuda".
    """
    return init_device_mesh(device_type, tuple(getattr(plan, axis) for axis in AXES), mesh_dim_names=AXES)


def axis_size(mesh: DeviceMesh, *axes: str) -> int:
    """Return the number of processes along one axis, or the product over several."""
    return math.prod(mesh.size(AXES.index(axis)) for axis in axes)


def axis_rank(mesh: DeviceMesh, axis: str) -> int:
    """Return this process's coordinate on one axis."""
    return mesh.get_local_rank(axis)


def data_rank(mesh: DeviceMesh) -> int:
    """Return which part of each global batch this process reads, from 0 to the product of the dp axes."""
    return axis_rank(mesh, "dp_replicate") * axis_size(mesh, "dp_shard") + axis_rank(mesh, "dp_shard")


def new_group_along(mesh: DeviceMesh, axis: str, *, ends_only: bool = False) -> ProcessGroup | None:
    """Create one more group of this process's peers along an axis. Collective over all processes of the mesh.

    Args:
        ends_only: only the first and the last process of the axis; those between get None.
    """
    columns = mesh.mesh.movedim(AXES.index(axis), 0).flatten(1)
    members = columns[[0, -1]] if ends_only else columns
    mine = None
    # torch wants every process to create the groups of all.
    for ranks in members.T.tolist():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def all_reduce_over(
    tensor: Tensor, mesh: DeviceMesh, axes: Iterable[str], op: dist.ReduceOp.RedOpType | None = None
) -> Tensor:
    """Reduce `tensor` in place over the given axes, by sum unless told otherwise, and return it."""
    for axis in axes:
        if axis_size(mesh, axis) > 1:
            dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM, group=mesh.get_group(axis))
    return tensor
