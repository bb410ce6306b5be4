"""Which process holds what."""

from collections.abc import Sequence

from meshtrain.config.mesh import PP, MeshPlan
from meshtrain.parallel.account import StageShare
from meshtrain.pictures.mesh_grid import MeshGrid
from meshtrain.pictures.scales import shown_value
from meshtrain.training.report import held_layers


def mesh_grid(mesh: MeshPlan, shares: Sequence[StageShare]) -> MeshGrid:
    """Return the processes of a mesh.

    Args:
        mesh: resolved.
        shares: the stages.
    """
    holds = tuple(_held([one for one in shares if one.pp_rank == pp_rank]) for pp_rank in range(mesh.pp))
    return MeshGrid(holds, tuple((axis, degree) for axis, degree in mesh.degrees.items() if axis != PP))


def _held(shares: Sequence[StageShare]) -> str:
    stages = "; ".join(f"stage {share.stage}: {held_layers(share)}" for share in shares)
    return f"{stages}; {_shown_count(sum(share.num_parameters for share in shares))} parameters"


def _shown_count(number: int) -> str:
    """Return a number with three digits, in millions (M) or billions (B)."""
    for size, unit in ((10**9, " B"), (10**6, " M")):
        if number >= size:
            return f"{shown_value(number / size)}{unit}"
    return f"{number:,}"
