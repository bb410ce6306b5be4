"""Check that there are messages beside matrix products that inductor can send in pieces."""

from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import Problem
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.tensor.rules import Problems


def check_async_tp(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    """Yield what `tensor.async_tp` lacks."""
    if not plan.tensor.async_tp:
        return
    if plan.mesh.tp == 1 or not plan.tensor.sequence_parallel:
        found = "mesh.tp = 1" if plan.mesh.tp == 1 else "tensor.sequence_parallel = false"
        yield Problem(
            f"tensor.async_tp sends the messages of sequence parallelism in pieces, and with {found} there are none",
            "leave it out, or set mesh.tp above 1 and tensor.sequence_parallel = true",
        )
    if not plan.compile.enabled or plan.compile.backend != "inductor":
        found = f"compile.backend = {plan.compile.backend!r}" if plan.compile.enabled else "compile.enabled = false"
        yield Problem(
            f"tensor.async_tp is done by inductor, and with {found} it does not run",
            "leave it out, or set compile.enabled = true and compile.backend = 'inductor'",
        )
    if plan.precision.compute == "float8":
        yield Problem(
            "tensor.async_tp with precision.compute = 'float8': inductor finds no products in float8 beside messages, "
            "because their inputs are cast in between",
            "leave one of them out",
        )
