"""Which processes of a pp rank hold the same, without a simulation."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshtrain.config.mesh import FSDP_AXES, STAGE_AXES, TP, MeshPlan
from meshtrain.parallel.tensor.head_share import Heads


class Shape(NamedTuple):
    """The shape of a parameter, and the dimension that tensor parallelism splits, if any."""

    sizes: tuple[int, ...]
    tp_dim: int | None


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
        rank, over_tp = _coordinate(mesh, FSDP_AXES, process), _coordinate(mesh, (TP,), process)
        own, first, last = (_rows(by_tp[over_tp], it, mesh.fsdp_degree) for it in (rank, 0, mesh.fsdp_degree - 1))
        holds_less = own == last != first
        groups.setdefault((_share(heads, over_tp, mesh.tp), tuple(by_tp[over_tp]), holds_less), []).append(process)
    return [tuple(group) for group in groups.values()]


def _coordinate(mesh: MeshPlan, axes: Sequence[str], process: int) -> int:
    """Return the coordinate of a process along neighboring axes."""
    behind = mesh.degree(*STAGE_AXES[STAGE_AXES.index(axes[-1]) + 1 :])
    return process // behind % mesh.degree(*axes)


def _part_of_tp(shape: Shape, rank: int, tp: int) -> tuple[int, ...]:
    if shape.tp_dim is None:
        return shape.sizes
    return tuple(_part(size, rank, tp) if dim == shape.tp_dim else size for dim, size in enumerate(shape.sizes))


def _rows(shapes: Iterable[tuple[int, ...]], rank: int, number: int) -> list[int]:
    """Return how many rows of each parameter FSDP2 gives to a process."""
    return [_part(sizes[0], rank, number) for sizes in shapes if sizes]


def _part(size: int, rank: int, number: int) -> int:
    """Return the size of a part. All have the same size, but the last ones may be smaller."""
    whole = -(-size // number)
    return max(0, min(whole, size - whole * rank))


def _share(heads: Heads | None, rank: int, tp: int) -> tuple[int, int] | None:
    if heads is None:
        return None
    share = heads.of(rank, tp)
    return len(share.queries), len(share.keys)
