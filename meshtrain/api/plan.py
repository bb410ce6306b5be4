"""The plan of a program, completed with what its model and its mesh say."""

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from meshtrain.config.arguments import wrong
from meshtrain.config.families import with_family
from meshtrain.config.mesh import AXES
from meshtrain.config.plan import ParallelPlan, PrecisionPlan
from meshtrain.errors import ModelError, PlanError
from meshtrain.models.adapters import is_adapter_parameter
from meshtrain.models.dtypes import dtype_name


def complete_plan(plan: ParallelPlan, model: PreTrainedModel, mesh: DeviceMesh | None) -> ParallelPlan:
    """Return a plan completed with the mesh, and the model's precision and rules.

    Raises:
        ConfigError: if the mesh is something else.
        PlanError: if it has other degrees than the plan, or the plan has what only runs can do.
        ModelError: if the parameters have several number formats, or one that does not train.
    """
    if mesh is not None:
        plan = _with_mesh(plan, mesh)
    _refuse_of_runs(plan)
    if "precision" not in plan.model_fields_set:
        plan = plan.model_copy(update={"precision": _precision_of(model)})
    return with_family(plan, model.config.model_type)


def _refuse_of_runs(plan: ParallelPlan) -> None:
    """Refuse what only `meshtrain train` does."""
    if plan.attention.documents == "segments":
        raise PlanError(
            "attention.documents = 'segments': in a program the mask of the model keeps documents apart",
            "leave it out, or train the model by `meshtrain train` or meshtrain.train",
        )


def _with_mesh(plan: ParallelPlan, mesh: DeviceMesh) -> ParallelPlan:
    if not isinstance(mesh, DeviceMesh):
        raise wrong("parallelize: mesh", mesh, "what meshtrain.build_mesh(plan) returns, or None")
    if mesh.mesh_dim_names != AXES:
        raise PlanError(
            f"the mesh has the axes {mesh.mesh_dim_names}, but a plan needs {AXES}",
            "build it with meshtrain.build_mesh",
        )
    degrees = dict(zip(AXES, mesh.shape, strict=True))
    for axis in plan.mesh.model_fields_set:
        asked = getattr(plan.mesh, axis)
        if asked not in (-1, degrees[axis]):
            raise PlanError(f"mesh.{axis} = {asked} in the plan, but the mesh that was passed has {degrees[axis]}")
    return plan.model_copy(update={"mesh": plan.mesh.model_copy(update=degrees)})


def _precision_of(model: PreTrainedModel) -> PrecisionPlan:
    # Adapters have a number format of their own: peft makes them float32 in a bfloat16 model.
    dtypes = {parameter.dtype for name, parameter in model.named_parameters() if not is_adapter_parameter(name)}
    name = dtype_name(next(iter(dtypes)))
    if len(dtypes) > 1 or name not in ("float32", "bfloat16", "float64"):
        found = ", ".join(sorted(dtype_name(dtype) for dtype in dtypes))
        raise ModelError(
            f"the parameters are {found}",
            'train in float32 (model.float()) or bfloat16, or set the formats in the plan, such as {"precision": '
            '{"parameters": "float32", "compute": "bfloat16"}}',
        )
    reduce = "float32" if name == "bfloat16" else name
    return PrecisionPlan.model_validate({"parameters": name, "compute": name, "reduce": reduce})
