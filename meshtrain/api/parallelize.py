"""The function `parallelize`: it makes a program's model parallel by the same path as every run."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from meshtrain.api.gradients import GradientCompletion
from meshtrain.api.handle import Handle
from meshtrain.api.model import make_adapted, make_parallel
from meshtrain.api.own_code import check_code_of_projections, check_code_of_stages
from meshtrain.api.own_loss import shifts_before_cross_entropy
from meshtrain.api.pipelined_model import PipelinedModel
from meshtrain.api.plan import complete_plan
from meshtrain.api.rebind import record_successors
from meshtrain.api.stock import check_stock
from meshtrain.api.values import Values, check_equal_on_all, put, put_buffers, take
from meshtrain.config.arguments import check_flag, whole_number
from meshtrain.config.plan import LossPlan, ParallelPlan, PrecisionPlan
from meshtrain.config.run import STOCK_ROUTER
from meshtrain.config.toml import read_plan
from meshtrain.errors import ConfigError, ModelError, PlanError
from meshtrain.models.adapters import put_on_adapters, take_off_adapters
from meshtrain.models.initialize import restore_buffers
from meshtrain.models.rotary import most_positions
from meshtrain.models.ties import check_ties
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.head.chunks import LossFunction
from meshtrain.parallel.head.proof import find_base
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.agreement import check_alike, gather_objects
from meshtrain.runtime.mesh import init_mesh
from meshtrain.runtime.process import check_number_format, check_peer_memory, join_for_script
from meshtrain.training.own_loss import check_own_loss
from meshtrain.verify.first_use import ensure_model_proven

AnyPlan = ParallelPlan | Mapping[str, Any] | str | Path
LONGEST_BALANCED = 1024
"""Stages are balanced for sequences of at most this many tokens."""


def parallelize(
    model: nn.Module,
    plan: AnyPlan,
    mesh: DeviceMesh | None = None,
    *,
    micro_batch_size: int = 1,
    seed: int | None = None,
    prove_unknown_class: bool = True,
    loss: LossFunction | None = None,
) -> Any:
    """Make a Hugging Face model parallel. Collective: every process of the program calls it.

    Without a pipeline (pp = 1) it returns the model that was passed, which is used as before:
    `model(**batch, labels=...)` returns the stock loss and full logits, and after `loss.backward()`
    every gradient is complete. With data parallelism each rank passes its own part of the batch.
    Over cp all ranks of a model pass full sequences, and each computes its part of them.
    Over cp the model gets a configuration of its own: make later changes in `model.config`.
    The loss is the mean over the trained tokens of all parts, and its gradient is that of this
    mean. (The auxiliary loss of routers in it is that of each part, weighted by its tokens.) A loss
    that you compute from the logits is summed over the parts: if it is a mean on each rank, divide
    it by `model.num_data_ranks`. A penalty on the parameters themselves is summed over dp_replicate
    only. After an exception in a backward pass call `optimizer.zero_grad()`.

    With a pipeline it returns a `PipelinedModel`. After that, the model that was passed cannot be
    used.

    The process group is joined if the program has not done so, and left when the program ends.

    Args:
        model: any causal LM of transformers (without a pipeline also one with another head), with
            values that are the same on every rank, or on the meta device: then call `initialize` or
            `load_weights` afterwards. Or such a model with LoRA adapters of peft, as
            `peft.get_peft_model` returns it.
        plan: a `ParallelPlan`, a table such as `{"mesh": {"tp": 4}}`, a .toml or .json file, or a
            shipped plan's name. If it sets no precision, the model keeps its number format.
        mesh: from `build_mesh`; None: as the plan says.
        micro_batch_size: sequences that pass through a pipeline at once; without a pipeline a
            complete batch does.
        seed: for dropout; None: torch's initial seed on the first rank.
        prove_unknown_class: prove on a tiny copy, once, that the plan computes what one device
            computes, if no shipped family is written for the class.
        loss: with a pipeline, what `forward_backward` minimizes in place of the cross-entropy: a
            function of logits and labels that returns a sum over tokens, as `meshtrain.train` takes
            it. Without a pipeline, the program computes its loss from the logits.

    Returns:
        The model itself, or a `PipelinedModel`.

    Raises:
        ConfigError: if the plan is wrong, or another argument has the wrong type or value.
        PlanError: if the plan does not fit the model or the number of processes, or differs between
            ranks.
        ModelError: if the model is parallel already, differs between ranks, cannot be cut or
            sharded, has other tied weights than its configuration says, or has code of the
            program's own that would be lost.

    If the plan is refused, or the model of another rank differs, the model stays as it was.

    Source: Megatron-LM (arXiv:1909.08053) for tp, GPipe (arXiv:1811.06965) and PipeDream
    (arXiv:1806.03377) for pp, ZeRO (arXiv:1910.02054) for dp_shard.
    """
    micro_batch_size = whole_number("parallelize: micro_batch_size", micro_batch_size, least=1)
    seed = None if seed is None else whole_number("parallelize: seed", seed)
    check_flag("parallelize: prove_unknown_class", prove_unknown_class)
    stock = check_stock(model)
    given = read_plan(plan)
    check_number_format(given.precision.products)
    wanted = complete_plan(given, stock, mesh)
    if wanted.tensor.async_tp:
        check_peer_memory(wanted.mesh.tp)
    if loss is not None:
        _check_loss(loss, wanted, stock)
    device = join_for_script()
    _check_call(wanted, micro_batch_size, prove_unknown_class, has_loss=loss is not None)
    parts = _take_apart(stock, wanted, micro_batch_size, prove=prove_unknown_class)
    pipeline = _pipeline_with_values(stock, parts, mesh, device, micro_batch_size=micro_batch_size, seed=seed)
    adapted = None if model is stock else model
    handle = Handle(pipeline, device, source=_source(stock), has_values=not parts.values.is_meta, adapted=adapted)
    if parts.plan.mesh.pp > 1:
        # The model that was passed stays complete, on meta: it defines how its adapters are saved.
        put_on_adapters(stock, parts.adapters)
        assert parts.shifts_labels is not None
        return PipelinedModel(handle, shifts_labels=parts.shifts_labels, loss=loss)
    make_parallel(stock, handle, GradientCompletion(pipeline))
    if adapted is not None:
        make_adapted(adapted, pipeline)
    return model


class _TakenApart(NamedTuple):
    """What `_take_apart` has taken off a model, and the resolved plan for it.

    `shifts_labels` says whether the loss of its class shifts labels; None without a pipeline, which
    does not need it.
    """

    plan: ParallelPlan
    values: Values
    adapters: Mapping[str, nn.Module]
    shifts_labels: bool | None


def _take_apart(stock: PreTrainedModel, wanted: ParallelPlan, micro_batch_size: int, *, prove: bool) -> _TakenApart:
    """Move a model to meta and take off its values and adapters, after all checks. Collective.

    An exception restores the model.
    """
    with ExitStack() as undo:
        adapters = take_off_adapters(stock)
        undo.callback(put_on_adapters, stock, adapters)
        check_ties(stock)
        values = take(stock, adapters, undo)
        check_equal_on_all(values)
        if wanted.mesh.pp > 1:
            check_code_of_stages(stock)
        resolved = _resolve(wanted, stock, micro_batch_size, prove=prove)
        check_code_of_projections(stock, resolved)
        shifts = shifts_before_cross_entropy(stock) if resolved.mesh.pp > 1 else None
        undo.pop_all()
    return _TakenApart(resolved, values, adapters, shifts)


def _pipeline_with_values(
    stock: PreTrainedModel,
    parts: _TakenApart,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    micro_batch_size: int,
    seed: int | None,
) -> Pipeline:
    """Return the pipeline of a model that was taken apart, with its values. Collective."""
    plan, values = parts.plan, parts.values
    _set_number_format(stock, plan.precision, has_values=not values.is_meta)
    training = stock.training
    pipeline = build_pipeline(
        stock,
        mesh or init_mesh(plan.mesh, device.type),
        plan,
        micro_batch_size=micro_batch_size,
        seed=gather_objects(torch.initial_seed() if seed is None else seed)[0],
        device=device,
        stock_loss=plan.mesh.pp == 1,
        adapters=parts.adapters,
    )
    for stage in pipeline.stages:
        stage.model.train(training)
        restore_buffers(stage.model)
    put_buffers(values, pipeline)
    record_successors(put(values, pipeline))
    return pipeline


def _set_number_format(stock: PreTrainedModel, precision: PrecisionPlan, *, has_values: bool) -> None:
    if has_values:
        # Stock `save_pretrained` writes this dtype; after `model.float()` the configuration still
        # has the dtype of the files.
        stock.config.dtype = stock.dtype
    for parameter in stock.parameters():
        # `stock.to` would also cast the rotary frequencies, which the model keeps in a format of
        # their own.
        parameter.data = parameter.data.to(getattr(torch, precision.parameters))


def _check_loss(loss: LossFunction, plan: ParallelPlan, model: PreTrainedModel) -> None:
    """Check a loss of the program's own.

    Raises:
        ConfigError: without a pipeline, or if it is not a sum over tokens.
    """
    if plan.mesh.pp == 1:
        raise ConfigError(
            "parallelize: loss is for a pipeline, but mesh.pp = 1, with which the model returns logits",
            "compute it from model(**batch).logits, and leave the argument out",
        )
    check_own_loss("parallelize: loss", loss, model.config.get_text_config().vocab_size)


def _check_call(plan: ParallelPlan, micro_batch_size: int, prove_unknown_class: bool, *, has_loss: bool) -> None:
    """Check that all ranks pass the same arguments. Collective.

    Otherwise some ranks would wait for messages that never come.
    """
    given: dict[str, object] = {"micro_batch_size": micro_batch_size, "prove_unknown_class": prove_unknown_class}
    given["loss"] = "passed" if has_loss else None
    for table, values in plan.model_dump().items():
        keys = values if isinstance(values, dict) else {"": values}
        given |= {f"{table}.{key}".removesuffix("."): value for key, value in keys.items()}
    check_alike("parallelize", given, PlanError)


def _resolve(plan: ParallelPlan, model: PreTrainedModel, micro_batch_size: int, *, prove: bool) -> ParallelPlan:
    if plan.mesh.pp == 1:
        plan = plan.model_copy(update={"loss": _loss_of_program(plan, model)})
    # Resolve before the proof, so that a contradiction at the real size is reported first.
    batch, world_size = _any_batch(plan, model, micro_batch_size), dist.get_world_size()
    router = None if plan.mesh.pp == 1 else STOCK_ROUTER
    resolved = resolve_plan(plan, model, batch, world_size, router=router)
    if resolved.mesh.cp > 1 and resolved.mesh.pp == 1:
        _check_head(model, resolved)
    if prove and dist.get_world_size() > 1:
        # The chunks are those of the real size.
        ensure_model_proven(model, plan.model_copy(update={"loss": resolved.loss}))
    if resolved.mesh.pp > 1:
        return resolved
    # The caller of the model uses its logits.
    tensor = resolved.tensor.model_copy(update={"loss_parallel": False})
    return resolved.model_copy(update={"tensor": tensor})


def _check_head(model: PreTrainedModel, plan: ParallelPlan) -> None:
    """Check that the head of a model computes each token alone, so that logits can be joined.

    Raises:
        PlanError: if not.
    """
    try:
        find_base(model)
    except ModelError as error:
        raise PlanError(
            f"mesh.cp = {plan.mesh.cp}: logits of parts cannot be joined, because {error.problems[0].found}",
            "use cp = 1",
        ) from error


def _loss_of_program(plan: ParallelPlan, model: PreTrainedModel) -> LossPlan:
    """Return how a model without a pipeline computes its loss: from all logits, which it returns.

    Raises:
        ModelError: if the plan asks for chunks, which the loss of the class does not allow.
    """
    if plan.loss.chunk_tokens in ("auto", 0):
        return LossPlan(chunk_tokens=0)
    find_base(model, stock_loss=True)
    return plan.loss


def _any_batch(plan: ParallelPlan, model: PreTrainedModel, micro_batch_size: int) -> BatchShape:
    """Return a batch shape that every plan can run; the real shapes are known at each call only."""
    rows = dist.get_world_size() * plan.mesh.pp * plan.pipeline.stages_per_rank * micro_batch_size
    length = min(most_positions(model.config) or LONGEST_BALANCED, LONGEST_BALANCED)
    unit = plan.mesh.tp if plan.mesh.cp == 1 else 2 * plan.mesh.cp * plan.mesh.tp
    return BatchShape(rows, micro_batch_size, max(unit, length // unit * unit))


def _source(model: PreTrainedModel) -> str | None:
    path = getattr(model, "name_or_path", "") or model.config.name_or_path
    return path if path and Path(path).is_dir() else None
