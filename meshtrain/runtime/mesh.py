"""The mesh: one coordinate system for all processes."""

import math
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshtrain.compat.distributed import concatenated, joined_axes
from meshtrain.config.mesh import (
    AXES,
    DATA_AXES,
    FSDP_AXES,
    REPLICA_AXES,
    STAGE,
    STAGE_AXES,
    TOKEN_AXES,
    MeshPlan,
    axes_named,
    fsdp_axis_of,
)


def init_mesh(plan: MeshPlan, device_type: str) -> DeviceMesh:
    """Arrange the processes along `AXES`. Axes of size 1 are kept.

    Args:
        plan: resolved degrees, whose product is the world size.
        device_type: "cpu" or "cuda".
    """
    return init_device_mesh(device_type, tuple(plan.degrees.values()), mesh_dim_names=AXES)


def axis_size(mesh: DeviceMesh, *axes: str) -> int:
    """Return the number of processes along one axis, or the product over several axes."""
    return math.prod(mesh.size(AXES.index(axis)) for axis in axes)


def axis_rank(mesh: DeviceMesh, axis: str) -> int:
    """Return this process's coordinate on one axis."""
    return mesh.get_local_rank(axis)


def fsdp_mesh(mesh: DeviceMesh, axes: Sequence[str] = FSDP_AXES) -> DeviceMesh:
    """Return the axes of FSDP2.

    Parameters are sharded over the last axis. Over an axis before it, they are copied.

    Args:
        mesh: all axes.
        axes: FSDP_AXES, or EXPERT_FSDP_AXES for stacked experts.
    """
    replicas = tuple(axis for axis in REPLICA_AXES if axis_size(mesh, axis) > 1)
    name = fsdp_axis_of({axis: axis_size(mesh, axis) for axis in axes}, axes)
    if name in AXES:
        return mesh[(*replicas, name)]
    joined = joined_axes(mesh, axes, name)
    return concatenated(mesh[replicas], joined) if replicas else joined


def fsdp_group(mesh: DeviceMesh, axes: Sequence[str] = FSDP_AXES) -> ProcessGroup:
    """Return the group over which FSDP2 shards a parameter.

    The arguments are those of `fsdp_mesh`.
    """
    return fsdp_mesh(mesh, axes).get_all_groups()[-1]


def replica_group(mesh: DeviceMesh) -> ProcessGroup | None:
    """Return the group of the full copies of this process's part; None if there is one copy."""
    wide = [axis for axis in REPLICA_AXES if axis_size(mesh, axis) > 1]
    assert len(wide) < 2, f"copies along several axes: {wide}"
    return mesh.get_group(wide[0]) if wide else None


def stage_group(mesh: DeviceMesh) -> ProcessGroup | None:
    """Return the group of the processes that hold the same stage; None if there is one.

    Collective over all processes of the mesh.
    """
    wide = [axis for axis in STAGE_AXES if axis_size(mesh, axis) > 1]
    if len(wide) > 1:
        return joined_axes(mesh, STAGE_AXES, STAGE).get_group()
    return mesh.get_group(wide[0]) if wide else None


def place_on(part: DeviceMesh, mesh: DeviceMesh, rank: int) -> tuple[int, ...]:
    """Return the coordinate of any process on a part of the mesh, such as that of a parameter.

    Args:
        part: some axes of the mesh, of which several may be joined.
        mesh: all axes.
        rank: number of the process.
    """
    everywhere = {}
    for axis in reversed(AXES):
        rank, everywhere[axis] = divmod(rank, axis_size(mesh, axis))
    assert part.mesh_dim_names is not None
    place = []
    for name in part.mesh_dim_names:
        at = 0
        for axis in axes_named(name):
            at = at * axis_size(mesh, axis) + everywhere[axis]
        place.append(at)
    return tuple(place)


def data_rank(mesh: DeviceMesh) -> int:
    """Return which part of each global batch this process reads.

    It is from 0 to the product of the data axes, minus 1.
    """
    return _rank_along(mesh, DATA_AXES)


def token_rank(mesh: DeviceMesh) -> int:
    """Return which part of the tokens of each global batch this process computes.

    It is from 0 to the product of the axes of tokens, minus 1.
    """
    return _rank_along(mesh, TOKEN_AXES)


def _rank_along(mesh: DeviceMesh, axes: Iterable[str]) -> int:
    rank = 0
    for axis in axes:
        rank = rank * axis_size(mesh, axis) + axis_rank(mesh, axis)
    return rank


def new_group_along(mesh: DeviceMesh, axis: str, coordinates: Sequence[int] | None = None) -> ProcessGroup | None:
    """Create one more group of this process's peers along an axis.

    Collective over all processes of the mesh.

    Args:
        coordinates: of the members on this axis; None: all. Other processes get None.
    """
    columns = mesh.mesh.movedim(AXES.index(axis), 0).flatten(1)
    members = columns if coordinates is None else columns[list(coordinates)]
    mine = None
    # torch requires every process to create the groups of all processes.
    for ranks in members.T.tolist():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def all_reduce_over(
    tensor: Tensor, mesh: DeviceMesh, axes: Iterable[str], op: dist.ReduceOp.RedOpType | None = None
) -> Tensor:
    """Reduce `tensor` in place over the given axes, by sum unless `op` is given, and return it."""
    for axis in axes:
        if axis_size(mesh, axis) > 1:
            dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM, group=mesh.get_group(axis))
    return tensor
