"""Check that a plan fits a model, its batches and the number of processes, before the start.

All contradictions are reported together.

Modules:
    async_tp: messages that are sent beside matrix products.
    batch: batch sizes and sequence lengths.
    context: how attention sees full sequences over cp.
    documents: how attention keeps packed documents apart.
    experts: whether experts can lie on several ranks of ep.
    float8: matrix products in float8.
    head: head and loss in chunks.
    pipeline: schedules, cuts, and the layers of each stage.
    routers: losses and biases of routers.
    shard: levels of sharding, and when gradients are reduced.
    tensor: tensor rules, their partial gradients, and the heads and widths that tp must divide.

The package itself has `resolve_plan`, which runs all checks and fills in the open settings, and
the checks of the model, of recomputation and of rotary frequencies.
"""

from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from meshtrain.config.mesh import EP, TP
from meshtrain.config.plan import ParallelPlan, TensorPlan
from meshtrain.config.run import STOCK_ROUTER, RouterConfig
from meshtrain.config.schedules import SCHEDULES
from meshtrain.errors import PlanError, Problem, UserError
from meshtrain.models.rotary import length_dependent
from meshtrain.parallel.check.async_tp import check_async_tp
from meshtrain.parallel.check.batch import BatchShape, check_batch, check_sequence
from meshtrain.parallel.check.context import check_context, resolve_context
from meshtrain.parallel.check.documents import check_documents, resolve_documents
from meshtrain.parallel.check.experts import check_experts
from meshtrain.parallel.check.float8 import check_float8, resolve_float8
from meshtrain.parallel.check.head import check_head, resolve_loss
from meshtrain.parallel.check.pipeline import check_pipeline, check_stages, resolve_layers
from meshtrain.parallel.check.routers import check_routers
from meshtrain.parallel.check.shard import check_shard, resolve_shard
from meshtrain.parallel.check.tensor import check_tensor
from meshtrain.parallel.cut.probe import find_layers, structures_shared
from meshtrain.parallel.tensor.derive import with_derived_rules
from meshtrain.parallel.tensor.rules import Problems

Check = Callable[[ParallelPlan, PreTrainedModel, BatchShape], Problems]


@structures_shared()
def resolve_plan(
    plan: ParallelPlan,
    model: PreTrainedModel,
    batch: BatchShape,
    world_size: int,
    *,
    router: RouterConfig | None = STOCK_ROUTER,
    known_tensor: TensorPlan | None = None,
    runs_model: bool = True,
) -> ParallelPlan:
    """Return the plan without open settings: no -1, `auto`, `balanced` or `even`.

    Args:
        plan: with its family already joined.
        model: the stock model on the meta device; it is not changed.
        batch: shape of the batches.
        world_size: number of processes.
        router: how the run trains routers; None: the class computes its own loss.
        known_tensor: the tensor rules of a resolved plan with the same `tensor` and `tp`. They are
            not derived again.
        runs_model: whether to run the model and its stages on meta, to find out whether it can be
            divided like this.

    Raises:
        PlanError: with every contradiction that can be found.
    """
    mesh = plan.mesh.resolve(world_size)
    plan = plan.model_copy(update={"mesh": mesh})
    problems: list[Problem] = []
    if known_tensor is not None:
        plan = plan.model_copy(update={"tensor": known_tensor})
    else:
        try:
            plan = with_derived_rules(plan, model)
        except PlanError as error:
            problems += error.problems
    for check in CHECKS:
        if runs_model or check not in RUNNING_CHECKS:
            problems += check(plan, model, batch)
    # The rules of tensor parallelism are right only without problems so far.
    if not problems and router is not None:
        problems += check_routers(plan, model, router)
    if problems:
        raise PlanError(problems)
    layers = resolve_layers(plan, model, batch)
    pipeline = plan.pipeline.model_copy(update={"layers_per_stage": layers, "split_at": None})
    plan = plan.model_copy(update={"pipeline": pipeline})
    return plan.model_copy(
        update={
            "context": resolve_context(plan, model, batch),
            "attention": resolve_documents(plan, model, batch),
            "precision": resolve_float8(plan, model),
            "shard": resolve_shard(plan),
            "loss": resolve_loss(plan, model, batch, runs_model=runs_model),
        }
    )


def _check_model(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    model_type = model.config.model_type
    if plan.model_types and model_type not in plan.model_types:
        known = ", ".join(plan.model_types)
        yield Problem(f"model_types: this plan is for {known}, but the model is a {model_type}", "use another plan")
    for name in ("layerdrop", "decoder_layerdrop"):
        if chance := getattr(model.config.get_text_config(), name, None):
            yield Problem(
                f"model.config.{name} = {chance}: a layer that is left out at random gets no gradient", "set it to 0"
            )


def _check_recompute(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    if plan.recompute.mode == "none":
        return
    if plan.recompute.mode == "selective":
        yield from _check_selective(plan)
    try:
        layer = find_layers(model)[1][0]
    except UserError:
        # The check of the pipeline reports this.
        return
    if not isinstance(layer, GradientCheckpointingLayer):
        yield Problem(
            f"recompute.mode = {plan.recompute.mode!r}: {type(layer).__name__} does not support recomputation",
            "set it to 'none'",
        )


def _check_rotary(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    try:
        layers, _ = find_layers(model)
    except UserError:
        # The check of the pipeline reports this.
        return
    if inside := [name for name in length_dependent(model) if name.startswith(f"{layers}.")]:
        yield Problem(
            f"the rotary frequencies of {inside[0]}, which is inside a layer, depend on the sequence length, so a "
            "recomputation or another microbatch could use those of another length",
            "choose another rope_type in rope_parameters (not longrope, not dynamic)",
        )


def _check_selective(plan: ParallelPlan) -> Problems:
    for axis in (axis for axis in (TP, EP) if plan.compile.enabled and plan.mesh.degrees[axis] > 1):
        yield Problem(
            f"recompute.mode = 'selective' with compile.enabled and mesh.{axis} > 1: attention and MLP are then "
            "compiled separately, and torch cannot select the results to keep inside them",
            "set recompute.mode = 'full', or compile.enabled = false",
        )
    if plan.mesh.pp > 1 and SCHEDULES[plan.pipeline.schedule].splits_backward:
        yield Problem(
            f"recompute.mode = 'selective' with pipeline.schedule = {plan.pipeline.schedule!r}: the schedule runs "
            "back through a layer twice, but torch returns what selective recomputation has kept only once",
            "set recompute.mode = 'full', or use another schedule",
        )


CHECKS: tuple[Check, ...] = (
    _check_model,
    check_batch,
    check_sequence,
    check_context,
    check_documents,
    check_tensor,
    check_async_tp,
    check_experts,
    check_float8,
    check_pipeline,
    check_stages,
    check_shard,
    _check_recompute,
    _check_rotary,
    check_head,
)
# These run the model on meta, or copy it, which takes longest.
RUNNING_CHECKS = (check_tensor, check_float8, check_stages)
