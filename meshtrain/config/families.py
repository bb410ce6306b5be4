"""The shipped families: the tensor rules that are written for a Hugging Face model type."""

from functools import cache

from meshtrain.config.plan import ParallelPlan
from meshtrain.config.reading import shipped_plans
from meshtrain.config.toml import load_plan

FAMILY_RULES = ("auto", "styles", "fused", "local_attributes", "local_inputs")


def find_family(model_type: str) -> ParallelPlan | None:
    """Return the shipped family that is written for a Hugging Face model type, if there is one.

    Args:
        model_type: as Hugging Face names it.
    """
    return next((family for family in shipped_families() if model_type in family.model_types), None)


@cache
def shipped_families() -> tuple[ParallelPlan, ...]:
    """Return the shipped families; they are read once."""
    return tuple(load_plan(path) for path in sorted((shipped_plans() / "families").glob("*.toml")))


def with_family(plan: ParallelPlan, model_type: str) -> ParallelPlan:
    """Return a plan with the tensor rules of the model's family, if it has no styles of its own.

    Nothing else of the family is used.

    Args:
        plan: not changed.
        model_type: as for `find_family`.
    """
    family = None if plan.tensor.styles else find_family(model_type)
    if family is None:
        return plan
    rules = {name: getattr(family.tensor, name) for name in FAMILY_RULES}
    return plan.model_copy(update={"tensor": plan.tensor.model_copy(update=rules)})
