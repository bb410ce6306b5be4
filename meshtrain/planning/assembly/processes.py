"""Which processes of a pp rank hold the same, without a simulation."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from meshtrain.config.mesh import STAGE_AXES, TP, MeshPlan
from meshtrain.parallel.shard import fsdp_split
from meshtrain.parallel.tensor.head_share import Heads


class Shape(NamedTuple):
    """The shape of a parameter, and how it is divided besides FSDP2.

    Attributes:
        sizes: of its dimensions.
        tp_dim: the dimension that tensor parallelism splits; None: none.
        of_experts: whether its first dimension counts experts, which ep divides.
    """

    sizes: tuple[int, ...]
    tp_dim: int | None
    of_experts: bool = False


def alike_processes(mesh: MeshPlan, shapes: Iterable[Shape], heads: Heads | None) -> list[tuple[int, ...]]:
    """Return the processes of a pp rank in groups that hold the same, counted from its first one.

    Along the axis of FSDP2, the last processes may hold less than the first one. Those between
    count with the first, which holds the most.

    Args:
        mesh: whose degrees are resolved.
        shapes: of the parameters of the pp rank.
        heads: of the model, if tp does not divide their numbers.
    """
    shapes = sorted({*shapes}, key=str)
    groups: dict[tuple[object, ...], list[int]] = {}
    by_tp = [[_part_of_tp(shape, rank, mesh.tp) for shape in shapes] for rank in range(mesh.tp)]
    for process in range(mesh.degree(*STAGE_AXES)):
        over_tp = _coordinate(mesh, (TP,), process)
        ends = process, 0, mesh.degree(*STAGE_AXES) - 1
        own, first, last = (_shares(by_tp[over_tp], by_tp[0], mesh, it) for it in ends)
        holds_less = own == last != first
        groups.setdefault((_share(heads, over_tp, mesh.tp), tuple(by_tp[over_tp]), holds_less), []).append(process)
    return [tuple(group) for group in groups.values()]


def _coordinate(mesh: MeshPlan, axes: Sequence[str], process: int) -> int:
    """Return the coordinate of a process along some axes, as if they were one."""
    coordinate = 0
    for axis in axes:
        behind = mesh.degree(*STAGE_AXES[STAGE_AXES.index(axis) + 1 :])
        coordinate = coordinate * mesh.degree(axis) + process // behind % mesh.degree(axis)
    return coordinate


def _part_of_tp(shape: Shape, rank: int, tp: int) -> Shape:
    if shape.tp_dim is None:
        return shape
    sizes = (_part(size, rank, tp) if dim == shape.tp_dim else size for dim, size in enumerate(shape.sizes))
    return shape._replace(sizes=tuple(sizes))


def _shares(shapes: Iterable[Shape], largest: Iterable[Shape], mesh: MeshPlan, process: int) -> list[int]:
    """Return how much of each parameter FSDP2 gives to a process, in the dimension that it splits.

    Args:
        shapes: of the part of tp.
        largest: of the part of tp that is the largest.
        mesh: resolved.
        process: its number in its pp rank.
    """
    found = []
    for shape, whole in zip(shapes, largest, strict=True):
        split = partial(fsdp_split, mesh=mesh, tp_dim=shape.tp_dim, of_experts=shape.of_experts)
        # The largest part decides on the dimension.
        (_, dim, axes), (sizes, _, _) = split(whole.sizes), split(shape.sizes)
        if sizes:
            found.append(_part(sizes[dim], _coordinate(mesh, axes, process), mesh.degree(*axes)))
    return found


def _part(size: int, rank: int, number: int) -> int:
    """Return the size of a part. All have the same size, but the last ones may be smaller."""
    whole = -(-size // number)
    return max(0, min(whole, size - whole * rank))


def _share(heads: Heads | None, rank: int, tp: int) -> tuple[int, int] | None:
    if heads is None:
        return None
    share = heads.of(rank, tp)
    return len(share.queries), len(share.keys)
