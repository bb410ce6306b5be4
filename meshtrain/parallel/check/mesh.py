"""The degrees of the mesh next to the number of processes."""

from meshtrain.config.plan import AXES, MeshPlan
from meshtrain.errors import PlanError


def resolve_mesh(mesh: MeshPlan, world_size: int) -> MeshPlan:
    fixed = mesh.pp * mesh.dp_replicate * mesh.tp
    degrees = " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES if axis != "dp_shard" or mesh.dp_shard != -1)
    if mesh.dp_shard != -1:
        if fixed * mesh.dp_shard != world_size:
            raise PlanError(
                f"mesh: {degrees} needs {fixed * mesh.dp_shard} processes, there are {world_size}; start as many, or "
                "set plan.mesh.dp_shard = -1 to use what is there"
            )
        return mesh
    if world_size % fixed:
        raise PlanError(
            f"mesh: {degrees} uses processes in groups of {fixed}, which does not divide the {world_size} there "
            f"are; start a multiple of {fixed}, or change the degrees"
        )
    return mesh.model_copy(update={"dp_shard": world_size // fixed})
