"""Count the stages, layers, parameters and bytes of every process under a plan.

The counts need no running process.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from meshtrain.config.mesh import STAGE_AXES
from meshtrain.config.optimizer import STOCK_OPTIMIZER
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ModelError
from meshtrain.models.adapters import adapter_parameters, adapters_held_by
from meshtrain.models.flops import flops_of_layers, flops_of_modules
from meshtrain.models.fused import unfuse
from meshtrain.models.packed import packable, packed_width
from meshtrain.parallel.cut.borders import StageRoutes
from meshtrain.parallel.cut.cutter import cut, find_borders
from meshtrain.parallel.cut.probe import Structure, find_layers, probe_structure
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.experts.stacks import expert_parameters
from meshtrain.parallel.matrices import hidden_matrices
from meshtrain.parallel.schedule import stage_owners
from meshtrain.parallel.shard import fsdp_split
from meshtrain.parallel.tensor.adapters import dims_of_adapters
from meshtrain.parallel.tensor.local_shapes import localize, may_cut_borders
from meshtrain.parallel.tensor.rules import resolve_rules


@dataclass(frozen=True)
class StageShare:
    """One stage, and the share of it that each of its processes holds.

    Attributes:
        stage: index of the stage.
        pp_rank: the coordinate of its processes on the pp axis.
        ranks: the ranks of its processes.
        layers: index of the first layer, and of the layer after the last.
        has_embedding: whether the stage takes input ids.
        has_head: whether the stage returns logits.
        num_parameters: of the full stage. The copy of a tied head counts.
        num_local_parameters: the largest number of parameters that one process holds.
        parameter_bytes: on one process.
        gradient_bytes: on one process, sharded like the parameters. Frozen ones have none.
        optimizer_bytes: on one process, for what the optimizer keeps of those that train, and the
            average of weights.
    """

    stage: int
    pp_rank: int
    ranks: tuple[int, ...]
    layers: tuple[int, int]
    has_embedding: bool
    has_head: bool
    num_parameters: int
    num_local_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class Message:
    """A tensor that a stage sends to the next.

    Attributes:
        stage: index of the stage that receives it.
        origin: where it comes from.
        shape: for a microbatch on the first process of tp, without sequence parallelism.
        num_bytes: that one process sends.
        has_gradient: whether a gradient of the same size travels back.
    """

    stage: int
    origin: str
    shape: tuple[int, ...]
    num_bytes: int
    has_gradient: bool


def account(
    model: PreTrainedModel,
    plan: ParallelPlan,
    kept: Callable[..., int] = STOCK_OPTIMIZER.state_bytes,
    adapters: Mapping[str, nn.Module] = MappingProxyType({}),
    *,
    packs_base: bool = False,
) -> list[StageShare]:
    """Return the share of every stage, in the order of the stages.

    Args:
        model: the stock model on meta. It is not changed.
        plan: resolved.
        kept: bytes of a number of a parameter, shape of a part of it, shape of the parameter, and
            whether it belongs to a matrix of the layers -> bytes that are kept for the part between
            steps, besides it.
        adapters: LoRA layers that were taken off the model. They are not changed.
        packs_base: whether frozen projections have four bits for each number.
    """
    full = copy.deepcopy(model)
    unfuse(full, plan.tensor.fused)
    dims, compute = _cut_dims(full, plan, adapters), getattr(torch, plan.precision.activations)
    layers = plan.pipeline.layer_counts
    stages = cut(full, layers, range(len(layers)))
    owners = stage_owners(plan.pipeline, plan.mesh.pp)
    shares = []
    for stage, owner in zip(stages, owners, strict=True):
        own = adapter_parameters(adapters_held_by(stage.model, adapters))
        found = packable(stage.model) if packs_base else ()
        packed = {
            f"{name}.weight": (module.out_features, packed_width(module.in_features, compute)) for name, module in found
        }
        held = _Held(dict(stage.model.named_parameters()), own, dims, packed)
        shares.append(_share(stage, owner, plan, held, kept))
    return shares


def local_shapes(
    model: PreTrainedModel, plan: ParallelPlan, adapters: Mapping[str, nn.Module] = MappingProxyType({})
) -> Iterator[tuple[str, nn.Parameter, list[int]]]:
    """Yield FQN, full parameter and shape of the largest shard of each parameter.

    The arguments are those of `account`.
    """
    full = copy.deepcopy(model)
    unfuse(full, plan.tensor.fused)
    dims, experts = _cut_dims(full, plan, adapters), expert_parameters(full)
    for name, parameter in {**dict(full.named_parameters()), **adapter_parameters(adapters)}.items():
        yield name, parameter, _local_shape(parameter.shape, plan, dims.get(name), of_experts=name in experts)


def _cut_dims(full: PreTrainedModel, plan: ParallelPlan, adapters: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return FQN -> the dimension that tensor parallelism divides."""
    if plan.mesh.tp == 1:
        return {}
    rules = resolve_rules(full, plan.tensor)
    return {**rules.sharded_dims, **dims_of_adapters(full, adapters, rules)}


def messages(model: PreTrainedModel, plan: ParallelPlan, rows: int, length: int) -> list[Message]:
    """Return what the stages send to each other for a microbatch, in the order of the stages.

    Args:
        model: the stock model on meta. It is not changed.
        plan: resolved, with a pipeline.
        rows: sequences of a microbatch.
        length: of a full sequence, in tokens.
    """
    layers = plan.pipeline.layer_counts
    full = copy.deepcopy(model)
    unfuse(full, plan.tensor.fused)
    structure, routes = find_borders(full, layers, getattr(torch, plan.precision.activations))
    if plan.mesh.tp > 1 and may_cut_borders(structure, routes):
        localize(structure, resolve_rules(full, plan.tensor), 0, plan.mesh.tp)
    return messages_between(structure, routes, plan, rows, length)


def messages_between(
    structure: Structure, routes: Sequence[StageRoutes], plan: ParallelPlan, rows: int, length: int
) -> list[Message]:
    """Return what stages send to each other for a microbatch.

    Args:
        structure: of the unfused model, with the shapes of the first process of tp.
        routes: of the stages.
        plan: as for `messages`.
        rows: as for `messages`.
        length: as for `messages`.
    """
    trace = structure.at(rows, length // plan.mesh.cp)
    found = []
    for stage, route in enumerate(routes):
        for value in route.received:
            key = value.captured_at.seen_in(trace).key
            is_split = plan.tensor.sequence_parallel and value.captured_at.follows_sequence(trace)
            size = math.prod(key.shape) * key.dtype.itemsize // (plan.mesh.tp if is_split else 1)
            origin = value.captured_at.described(trace)
            found.append(Message(stage, origin, tuple(key.shape), size, key.dtype.is_floating_point))
    return found


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Return the FLOPs per token of the full model, forward and backward.

    The FLOPs of recomputation are not included.
    """
    _, layers = find_layers(model)
    return sum(flops_around_layers(model)) + sum(flops_of_layers(layers, model.config, sequence_length))


def flops_around_layers(model: PreTrainedModel) -> tuple[float, float]:
    """Return the FLOPs per token before and after the layers, forward and backward.

    For a model that cannot be cut, only the head is counted.
    """
    try:
        structure = probe_structure(model)
    except ModelError:
        return 0.0, flops_of_modules([model.get_output_embeddings()])
    before, after = (flops_of_modules(map(model.get_submodule, names)) for names in (structure.before, structure.after))
    return before, after


class _Held(NamedTuple):
    """The parameters of a stage.

    Attributes:
        own: FQN -> parameter of the model.
        of_adapters: FQN -> parameter of an adapter.
        dims: FQN -> the dimension that tensor parallelism divides.
        packed: FQN -> shape of a packed weight, in numbers of the format of the computation.
    """

    own: Mapping[str, nn.Parameter]
    of_adapters: Mapping[str, nn.Parameter]
    dims: Mapping[str, int]
    packed: Mapping[str, Sequence[int]]


def _share(stage: Stage, pp_rank: int, plan: ParallelPlan, held: _Held, kept: Callable[..., int]) -> StageShare:
    experts = expert_parameters(stage.model) if plan.mesh.ep > 1 else set()
    parameters = {**held.own, **held.of_adapters}
    shapes = {
        name: _local_shape(parameter.shape, plan, held.dims.get(name), of_experts=name in experts)
        for name, parameter in parameters.items()
    }
    local = {name: math.prod(shape) for name, shape in shapes.items()}
    width, compute = (getattr(torch, it).itemsize for it in (plan.precision.parameters, plan.precision.activations))
    matrices = hidden_matrices(stage)
    # Adapters, and what trains in full beside them, have a number format of their own.
    beside = {name for name, parameter in parameters.items() if held.of_adapters and parameter.requires_grad}
    widths = {name: parameters[name].itemsize if name in beside else width for name in parameters}
    packed = [_local_shape(shape, plan, held.dims.get(name), of_experts=False) for name, shape in held.packed.items()]
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    per_stage = plan.mesh.degree(*STAGE_AXES)
    return StageShare(
        stage=stage.index,
        pp_rank=pp_rank,
        ranks=tuple(range(pp_rank * per_stage, (pp_rank + 1) * per_stage)),
        layers=(stage.first_layer, stage.last_layer),
        has_embedding=stage.is_first,
        has_head=stage.is_last,
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        num_local_parameters=sum(local.values()),
        parameter_bytes=sum(local[name] * widths[name] for name in parameters if name not in held.packed)
        + sum(map(math.prod, packed)) * compute,
        gradient_bytes=sum(local[name] * widths[name] for name in trained),
        optimizer_bytes=sum(
            kept(widths[name], shapes[name], parameters[name].shape, of_matrix=name in matrices) for name in trained
        ),
    )


def _local_shape(full: Sequence[int], plan: ParallelPlan, dim: int | None, *, of_experts: bool) -> list[int]:
    """Return the shape of the largest shard of a parameter.

    The shards are equal, but the last ones may be smaller.

    Args:
        full: shape of the parameter.
        plan: resolved.
        dim: the dimension that tensor parallelism divides.
        of_experts: whether its first dimension counts experts, which ep divides.
    """
    shape = list(full)
    if dim is not None:
        shape[dim] = -(-shape[dim] // plan.mesh.tp)
    shape, split, axes = fsdp_split(shape, plan.mesh, tp_dim=dim, of_experts=of_experts)
    if shape:
        shape[split] = -(-shape[split] // plan.mesh.degree(*axes))
    return shape
