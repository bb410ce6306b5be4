"""Check that the degrees of the mesh fit the number of processes."""

from meshtrain.config.mesh import MeshPlan
from meshtrain.errors import PlanError


def resolve_mesh(mesh: MeshPlan, world_size: int) -> MeshPlan:
    """Return the mesh without an open axis.

    Args:
        mesh: with at most one open axis.
        world_size: number of processes.

    Raises:
        PlanError: if its degrees do not fit the number of processes.
    """
    fixed, degrees = mesh.fixed_degree, mesh.described(only_wide=False)
    if mesh.open_axis is None and fixed != world_size:
        raise PlanError(
            f"mesh: {degrees} needs {fixed} processes, there are {world_size}; start as many, or "
            "set plan.mesh.dp_shard = -1 to use what is there"
        )
    if world_size % fixed:
        raise PlanError(
            f"mesh: {degrees} uses processes in groups of {fixed}, which does not divide the {world_size} there "
            f"are; start a multiple of {fixed}, or change the degrees"
        )
    return mesh.with_world_size(world_size)
