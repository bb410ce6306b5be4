"""Build a pipeline from a stock model, in the one order that is correct."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from meshtrain.compat.compile import allow_symmetric_memory
from meshtrain.compat.transformers import attention_implementation
from meshtrain.config.mesh import CP, EP, PP, TOKEN_AXES, TP
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import STOCK_ROUTER, RouterConfig
from meshtrain.config.schedules import SCHEDULES
from meshtrain.errors import ModelError
from meshtrain.models.adapters import (
    adapter_parameters,
    adapters_held_by,
    forbid_changes,
    put_on_adapters,
    unfuse_adapters,
)
from meshtrain.models.dtypes import dtype_name
from meshtrain.models.fused import FusedParameter, compute_at_once, unfuse
from meshtrain.models.initialize import materialize
from meshtrain.models.packed import packable
from meshtrain.parallel.context.mixing import mixing_blocks
from meshtrain.parallel.context.parts import ContextParallel
from meshtrain.parallel.context.positions import skips_padding
from meshtrain.parallel.cut.cutter import cut
from meshtrain.parallel.cut.probe import Structure
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.execution import apply_compile, apply_recompute
from meshtrain.parallel.experts.dispatch import apply_expert_parallel
from meshtrain.parallel.experts.use import ExpertUse, countable_stacks, counts_tokens
from meshtrain.parallel.float8 import apply_float8
from meshtrain.parallel.float8.gather import apply_float8_gather, gathers_in_float8
from meshtrain.parallel.float8.layers import find_float8_layers
from meshtrain.parallel.head.chunks import ChunkedHead
from meshtrain.parallel.head.proof import find_base
from meshtrain.parallel.packing import apply_packing
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.randomness import ForwardStreams, Streams, has_dropout
from meshtrain.parallel.replicas import Replicas
from meshtrain.parallel.rotary_length import RotaryLength
from meshtrain.parallel.routers.formulas import find_formulas
from meshtrain.parallel.routers.loss import RouterLoss
from meshtrain.parallel.schedule import stage_owners
from meshtrain.parallel.shard import apply_shard, needs_fsdp, parameter_device
from meshtrain.parallel.stage_attention import StageAttention
from meshtrain.parallel.tensor import apply_tensor_parallel
from meshtrain.parallel.tensor.adapters import check_adapters, drops_out
from meshtrain.parallel.tensor.dora import apply_dora
from meshtrain.parallel.tensor.local_shapes import localize, may_cut_borders
from meshtrain.parallel.tensor.rules import TensorRules, resolve_rules
from meshtrain.parallel.tied import Tie, TiedCopies
from meshtrain.runtime.mesh import axis_rank, axis_size, new_group_along, replica_group, token_rank

_REAL: AbstractContextManager[Any] = nullcontext()


def build_pipeline(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    plan: ParallelPlan,
    *,
    micro_batch_size: int,
    seed: int,
    device: torch.device,
    router: RouterConfig = STOCK_ROUTER,
    stock_loss: bool = False,
    adapters: Mapping[str, nn.Module] = MappingProxyType({}),
    base_is_elsewhere: bool = False,
    packs_base: bool = False,
    allocation: AbstractContextManager[Any] = _REAL,
    structure: Structure | None = None,
    peers: ProcessGroup | None = None,
) -> Pipeline:
    """Build a pipeline from a stock model, with memory for its parameters but without values.

    Args:
        model: on the meta device. It cannot be used afterward.
        mesh: all processes, as arranged by `init_mesh`.
        plan: resolved, so that no value is `auto`, `balanced` or -1.
        micro_batch_size: in sequences.
        seed: of the run, for dropout.
        device: the device that computes.
        router: how the routers are trained.
        stock_loss: whether the loss is computed by the model's own forward pass. That loss then
            includes the auxiliary loss of the routers. Only without a pipeline.
        adapters: LoRA layers that `take_off_adapters` removed from the model. Without a pipeline
            the same layers are put back on it; with one, each stage gets copies.
        base_is_elsewhere: whether checkpoints hold only what trains, because the frozen parameters
            and the buffers are in the files that they came from.
        packs_base: whether the frozen projections have four bits for each number (`lora.base`).
        allocation: entered while memory is allocated. `meshtrain.planning` passes the mode of fake
            tensors, which allocate none.
        structure: of the unfused model, if it is known, and tensor parallelism does not cut what
            the stages send. It is not changed.
        peers: the group for messages between stages, if another pipeline on the same processes has
            made one. Both use it one after the other.

    Returns:
        The stages of this process. Call `initialize` or `load_shards` next.

    Raises:
        PlanError: for a rule that does not fit the model.
        ModelError: for a model that cannot be cut, or whose trained parameters have several number
            formats where FSDP2 is needed.
    """
    whole = _find(model, mesh, plan, device, router, adapters, stock_loss=stock_loss, packs_base=packs_base)
    compute = getattr(torch, plan.precision.activations)
    stages = cut(model, plan.pipeline.layer_counts, _own_stages(mesh, plan), compute, structure)
    _localize_borders(stages, whole.rules, mesh)
    streams = ForwardStreams(seed, token_rank(mesh))
    summed_over_tp: set[str] = set()
    head: ChunkedHead | None = None
    for stage in stages:
        summed_over_tp |= _parallelize_stage(stage, mesh, plan, whole, adapters)
        if whole.base is not None and stage.is_last:
            context = whole.context if stock_loss else None
            head = ChunkedHead(
                stage.model, whole.base, plan.loss.size, stage.channel, stock_loss=stock_loss, context=context
            )
        with allocation:
            materialize(
                stage.model,
                device,
                parameter_device=parameter_device(plan, device),
                tied=stage.names_of_one_parameter(),
            )
            whole.expert_use.watch(stage.model)
        streams.watch(stage.model, stage.index)
    return Pipeline(
        stages=tuple(stages),
        mesh=mesh,
        plan=plan,
        micro_batch_size=micro_batch_size,
        parameter_names=frozenset(whole.trains),
        trained_names=frozenset(name for name, is_trained in whole.trains.items() if is_trained),
        fused=whole.fused,
        summed_over_tp=frozenset(summed_over_tp),
        logits_are_sharded=whole.rules.logits_are_sharded,
        tied_copies=_tied_copies(stages, mesh, plan),
        replicas=_replicas(stages, mesh, plan),
        streams=streams,
        attention=whole.attention,
        context=whole.context,
        router_loss=whole.router_loss,
        expert_use=whole.expert_use,
        rotary_length=RotaryLength(tuple(stages), mesh, device),
        peers=new_group_along(mesh, PP) if peers is None and axis_size(mesh, PP) > 1 else peers,
        head=head,
        base_is_elsewhere=base_is_elsewhere,
        packs_base=packs_base,
    )


@dataclass(frozen=True)
class _Whole:
    """What is known of a whole model before it is cut.

    Attributes:
        context: what this process does with its part of the sequences; None without cp.
        attention: of its stages; None if it is the model's own.
        watch_attention: makes a stage compute it.
        base: name of the base model if the head runs in chunks; otherwise None.
        fused: the parameters that are kept in parts.
        trains: FQN -> whether the parameter trains. A tied weight appears once.
        rules: of tensor parallelism.
        in_float8: names of the layers that compute in float8.
        in_four_bits: names of the projections whose weights are packed.
        router_loss: the losses of its routers.
        expert_use: counts the choices of its routers.
        watches_routers: whether their results are needed besides those of the layers.
        stock_loss: whether the loss is computed by its own forward pass, which a program calls.
    """

    context: ContextParallel | None
    attention: StageAttention | None
    watch_attention: Callable[[PreTrainedModel], None] | None
    base: str | None
    fused: tuple[FusedParameter, ...]
    trains: Mapping[str, bool]
    rules: TensorRules
    in_float8: Sequence[str]
    in_four_bits: Sequence[str]
    router_loss: RouterLoss
    expert_use: ExpertUse
    watches_routers: bool
    stock_loss: bool


def _find(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    plan: ParallelPlan,
    device: torch.device,
    router: RouterConfig,
    adapters: Mapping[str, nn.Module],
    *,
    stock_loss: bool,
    packs_base: bool,
) -> _Whole:
    """Find what must be known before a model is cut, and keep its fused parameters in parts."""
    # Tiny copies are tried while the model still has the modules of its class.
    context = _context(model, mesh, plan, cuts_calls=stock_loss)
    attention = _attention(model, plan, context)
    base = find_base(model, stock_loss=stock_loss) if plan.loss.size else None
    # A program passes full sequences, and its class takes the loss of their labels.
    cut_at = find_base(model) if context and stock_loss else ""
    tied = dict(model.all_tied_weights_keys)
    fused = unfuse(model, plan.tensor.fused)
    fused += unfuse_adapters(adapters, model, fused)
    parameters = dict(model.named_parameters(remove_duplicate=False)) | adapter_parameters(adapters)
    formulas = None if stock_loss else find_formulas(model, router)
    rules = _tensor_rules(model, mesh, plan, adapters)
    counted = countable_stacks(model, rules.styles) if counts_tokens(plan, router, stock_loss=stock_loss) else {}
    if needs_fsdp(plan):
        _check_formats(model, adapters)
    return _Whole(
        context,
        attention,
        watch_attention=None if attention is None else partial(attention.watch, base=cut_at),
        base=base,
        fused=tuple(fused),
        trains={name: parameter.requires_grad for name, parameter in parameters.items() if name not in tied},
        rules=rules,
        in_float8=find_float8_layers(model, plan, rules).chosen if plan.precision.compute == "float8" else (),
        in_four_bits=[name for name, _ in packable(model)] if packs_base else (),
        router_loss=RouterLoss(formulas, axis_size(mesh, *TOKEN_AXES), device, context),
        expert_use=ExpertUse(counted, mesh, device, context, router.bias_update_rate),
        watches_routers=formulas is not None or bool(router.bias_update_rate),
        stock_loss=stock_loss,
    )


def _localize_borders(stages: Sequence[Stage], rules: TensorRules, mesh: DeviceMesh) -> None:
    structure, tp = stages[0].structure, axis_size(mesh, TP)
    # All stages share the structure.
    if structure is not None and tp > 1 and may_cut_borders(structure, [it.channel.routes for it in stages]):
        localize(structure, rules, axis_rank(mesh, TP), tp)


def _tensor_rules(
    model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan, adapters: Mapping[str, nn.Module]
) -> TensorRules:
    if axis_size(mesh, TP) == 1:
        return TensorRules()
    rules = resolve_rules(model, plan.tensor)
    check_adapters(model, adapters, rules, is_split=plan.tensor.sequence_parallel)
    return rules


def _parallelize_stage(
    stage: Stage,
    mesh: DeviceMesh,
    plan: ParallelPlan,
    whole: _Whole,
    adapters: Mapping[str, nn.Module],
) -> set[str]:
    """Make one stage parallel in place, and return the names of parameters to be summed over tp."""
    tp, summed_over_tp = axis_size(mesh, TP), set[str]()
    own = adapters_held_by(stage.model, adapters)
    if stage.num_stages > 1:
        own = copy.deepcopy(own)
    draws = has_dropout(stage.model) or any(map(drops_out, own.values()))
    tp_streams = Streams(axis_rank(mesh, TP)) if tp > 1 and draws else None
    # torch splits a backward pass by its graph, and finds neither late gradients nor those of the
    # parts of a joined weight there.
    is_split = stage.num_stages > 1 and SCHEDULES[plan.pipeline.schedule].splits_backward
    if tp > 1:
        summed_over_tp = apply_tensor_parallel(
            stage, mesh[TP], plan, whole.rules, own, tp_streams, posts_sums=not is_split
        )
    if axis_size(mesh, EP) > 1:
        apply_expert_parallel(stage.model, mesh)
    float8_layers = apply_float8(stage, whole.in_float8, plan.precision.float8.recipe)
    apply_packing(stage, whole.in_four_bits, getattr(torch, plan.precision.activations))
    if whole.watch_attention is not None:
        whole.watch_attention(stage.model)
    exact = apply_dora(stage.model, own, mesh.get_group(TP) if tp > 1 else None)
    put_on_adapters(stage.model, own)
    forbid_changes(own)
    if tp == 1 and not is_split:
        compute_at_once(stage.model)
    apply_recompute(stage, plan.recompute, tp_streams)
    whole.router_loss.watch(stage)
    if plan.tensor.async_tp:
        allow_symmetric_memory(mesh.get_group(TP))
    apply_compile(stage, plan, watches_routers=whole.watches_routers)
    # A program may use parameters between the passes, and a pipeline computes other microbatches.
    apply_shard(stage, mesh, plan, keeps_root=stage.num_stages == 1 and not whole.stock_loss)
    if gathers_in_float8(plan):
        apply_float8_gather(stage, [layer for layer in float8_layers if layer not in exact])
    return summed_over_tp


def _context(
    model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan, *, cuts_calls: bool
) -> ContextParallel | None:
    if axis_size(mesh, CP) == 1:
        return None
    return ContextParallel(
        mesh.get_group(CP),
        plan.context,
        _base(model),
        mixing_blocks(model),
        skips_padding=skips_padding(model),
        cuts_calls=cuts_calls,
    )


def _attention(model: PreTrainedModel, plan: ParallelPlan, context: ContextParallel | None) -> StageAttention | None:
    by_documents = plan.attention.documents == "segments"
    return StageAttention(_base(model), context, by_documents=by_documents) if context or by_documents else None


def _base(model: PreTrainedModel) -> str:
    base = attention_implementation(model.config.get_text_config())
    assert base is not None, "the plan was not checked"
    return base


def _check_formats(model: nn.Module, adapters: Mapping[str, nn.Module]) -> None:
    parameters = {**dict(model.named_parameters()), **adapter_parameters(adapters)}
    formats = {dtype_name(p.dtype): name for name, p in parameters.items() if p.requires_grad}
    if len(formats) > 1:
        found = " and ".join(f"{dtype} ({name})" for dtype, name in sorted(formats.items()))
        raise ModelError(
            f"the trained parameters have several number formats, {found}, whose gradients cannot be reduced together",
            "cast the model or its adapters to one, or freeze the others",
        )


def _own_stages(mesh: DeviceMesh, plan: ParallelPlan) -> list[int]:
    owners = stage_owners(plan.pipeline, axis_size(mesh, PP))
    return [stage for stage, owner in enumerate(owners) if owner == axis_rank(mesh, PP)]


def _replicas(stages: list[Stage], mesh: DeviceMesh, plan: ParallelPlan) -> Replicas:
    parameters = [parameter for stage in stages for parameter in stage.model.parameters()]
    return Replicas(parameters, None if needs_fsdp(plan) else replica_group(mesh))


def _tied_copies(stages: list[Stage], mesh: DeviceMesh, plan: ParallelPlan) -> TiedCopies:
    pp = axis_size(mesh, PP)
    if pp == 1:
        return TiedCopies()
    owners = stage_owners(plan.pipeline, pp)
    held = {stage.index: dict(stage.named_parameters(remove_duplicate=False)) for stage in stages}
    groups: dict[tuple[int, ...], ProcessGroup | None] = {}
    ties = []
    for source, names in stages[0].stages_of_ties.items():
        members = tuple(sorted({owners[stage] for stage in names}))
        if len(members) > 1 and members not in groups:
            groups[members] = new_group_along(mesh, PP, members)
        copies = {stage: held[stage][name] for stage, name in names.items() if stage in held}
        original = next((copies[stage] for stage, name in names.items() if name == source and stage in copies), None)
        ties.append(Tie(tuple(copies.values()), original, groups.get(members)))
    return TiedCopies(ties)
