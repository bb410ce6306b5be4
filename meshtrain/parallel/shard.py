"""Shard parameters, gradients and optimizer state over the dp axes (FSDP2)."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshtrain.compat.dtensor import split_dim
from meshtrain.compat.fsdp import (
    before_reduction,
    fill_lacking_gradients,
    forget_gathered_gradients,
    gathered_parameters,
)
from meshtrain.config.mesh import EXPERT_FSDP_AXES, FSDP_AXES, REPLICA_AXES, MeshPlan
from meshtrain.config.plan import ParallelPlan, ShardPlan
from meshtrain.parallel.cut.probe import shared_parameters
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.experts.stacks import expert_stacks
from meshtrain.runtime.mesh import fsdp_mesh

# Relative to a parameter without padding.
MOST_PADDED = 1.1
_GATHERED = "meshtrain_gathered"


def needs_fsdp(plan: ParallelPlan) -> bool:
    """Return whether a plan needs FSDP2: to shard, to offload, or for several number formats.

    Otherwise FSDP2 would only add a copy of every parameter and gradient per step.
    """
    return plan.mesh.is_sharded or _converts(plan)


def has_formats(plan: ParallelPlan) -> bool:
    """Return whether parameters, products and reductions have several number formats."""
    precision = plan.precision
    return len({precision.parameters, precision.activations, precision.reduce}) > 1


def _converts(plan: ParallelPlan) -> bool:
    return has_formats(plan) or plan.shard.offload == "cpu"


def _precision(plan: ParallelPlan) -> MixedPrecisionPolicy:
    compute, reduce = plan.precision.activations, plan.precision.reduce
    return MixedPrecisionPolicy(param_dtype=getattr(torch, compute), reduce_dtype=getattr(torch, reduce))


def parameter_device(plan: ParallelPlan, device: torch.device) -> torch.device:
    """Return the device that holds parameters, gradients and optimizer state between uses."""
    return torch.device("cpu") if plan.shard.offload == "cpu" else device


def apply_shard(stage: Stage, mesh: DeviceMesh, plan: ParallelPlan, *, keeps_root: bool) -> None:
    """Shard a stage in place, layer by layer, if `needs_fsdp` is true for the plan.

    Args:
        stage: of the model.
        mesh: all processes.
        plan: resolved.
        keeps_root: whether what belongs to no layer stays gathered until the backward pass, which
            begins with it, also where layers are freed.
    """
    if not needs_fsdp(plan):
        return
    offload = _offload_policy(plan, mesh.device_type)
    data_mesh = fsdp_mesh(mesh)
    reshard = plan.shard.reshard_after_forward == "always"
    shard = partial(
        fully_shard,
        mesh=data_mesh,
        reshard_after_forward=reshard,
        mp_policy=_precision(plan),
        offload_policy=offload,
        shard_placement_fn=partial(_placement, plan.mesh.fsdp_degree),
    )
    # Two groups of FSDP2 that share a parameter would lose gradients without an error, and a group
    # does not look into modules that have one of their own. So layers that share a parameter belong
    # to the group of the stage.
    shared = shared_parameters(stage.own_layers())
    alone: set[nn.Parameter] = set()
    for layer in stage.own_layers():
        alone |= _shard_experts(layer, mesh, plan, shard) if plan.mesh.ep > 1 else set()
        if shared.isdisjoint(layer.parameters()):
            shard(layer, ignored_params=alone)
    # None: only layers are freed.
    shard(stage.model, reshard_after_forward=None if reshard and keeps_root else reshard, ignored_params=alone)
    left = (name for name, it in stage.named_parameters() if it not in alone and not isinstance(it, DTensor))
    assert (name := next(left, None)) is None, f"{name} is in no group of FSDP2"
    if plan.shard.prefetch != "implicit" and plan.mesh.is_sharded:
        _prefetch(stage, plan.shard.prefetch)
    for module in fsdp_modules(stage.model):
        # The loss is divided once, by the token count of all processes, so gradients are summed.
        # Without the forced sum, torch would use a pre-multiplied reduction, which gloo lacks.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # A parameter may lack a gradient on this process alone: an expert may get tokens elsewhere
        # only.
        before_reduction(module, partial(fill_lacking_gradients, filled=stage.filled))


def _shard_experts(
    layer: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, shard: Callable[..., object]
) -> set[nn.Parameter]:
    """Shard the experts of a layer over the ranks that hold the same ones.

    Returns:
        The parameters that FSDP2 must leave alone, because this rank holds the only copy.
    """
    stacks = expert_stacks(layer).values()
    if plan.mesh.degree(*EXPERT_FSDP_AXES, *REPLICA_AXES) == 1 and not _converts(plan):
        return {parameter for stack in stacks for parameter in stack.parameters()}
    # The weights of the results keep the number format of the router.
    policy = replace(_precision(plan), cast_forward_inputs=False)
    placement = partial(_placement, plan.mesh.degree(*EXPERT_FSDP_AXES))
    for stack in stacks:
        shard(stack, mesh=fsdp_mesh(mesh, EXPERT_FSDP_AXES), mp_policy=policy, shard_placement_fn=placement)
    return set()


def sharded_dim(shape: Sequence[int], degree: int, cut: Collection[int] = ()) -> int:
    """Return the dimension of a parameter that FSDP2 shards.

    It is the first one, which FSDP2 pads to equal parts. A stack of few experts would mostly be
    padding, which is sent and stored like the rest. Then it is the next dimension that is a
    multiple of the degree, because FSDP2 does not pad others than the first.

    Args:
        shape: on one process of the other axes, that of the largest part. All processes that share
            a tensor must choose the same dimension.
        degree: number of processes that share it.
        cut: dimensions that other axes divide.
    """
    padded = -(-shape[0] // degree) * degree if shape else 0
    if not shape or padded <= MOST_PADDED * shape[0]:
        return 0
    return next((dim for dim in range(1, len(shape)) if dim not in cut and shape[dim] % degree == 0), 0)


def fsdp_split(
    shape: Sequence[int], mesh: MeshPlan, *, tp_dim: int | None, of_experts: bool
) -> tuple[list[int], int, tuple[str, ...]]:
    """Return what FSDP2 splits of a parameter.

    Args:
        shape: on the process of tp that has the largest part.
        mesh: resolved.
        tp_dim: the dimension that tp divides; None: none.
        of_experts: whether the first dimension counts experts, which ep divides.

    Returns:
        The shape on one process of the other axes, the dimension that is split, and the axes over
        which it is.
    """
    sizes, cut = [*shape], set() if tp_dim is None else {tp_dim}
    if not of_experts or mesh.ep == 1:
        return sizes, sharded_dim(sizes, mesh.fsdp_degree, cut), FSDP_AXES
    sizes[0] //= mesh.ep
    return sizes, sharded_dim(sizes, mesh.degree(*EXPERT_FSDP_AXES), {0, *cut}), EXPERT_FSDP_AXES


def _placement(degree: int, parameter: nn.Parameter) -> Shard:
    shape, cut = list(parameter.shape), []
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            dim = split_dim(placement)
            if dim is not None:
                cut.append(dim)
                shape[dim] = -(-shape[dim] // parameter.device_mesh.size(axis))
    return Shard(sharded_dim(shape, degree, cut))


def _prefetch(stage: Stage, depth: int) -> None:
    """Gather some layers of a stage ahead, in both directions."""
    # A layer may have experts that are gathered by themselves, or belong to the root.
    layers = [modules for layer in stage.own_layers() if (modules := fsdp_modules(layer))]
    root = stage.model
    assert isinstance(root, FSDPModule)
    root.set_modules_to_forward_prefetch([*chain(*layers[:depth])])
    # The backward pass begins in the root.
    root.set_modules_to_backward_prefetch([*chain(*layers[::-1][:depth])])
    for number, (layer, *_) in enumerate(layers):
        layer.set_modules_to_forward_prefetch([*chain(*layers[number + 1 :][:depth])])
        layer.set_modules_to_backward_prefetch([*chain(*layers[:number][::-1][:depth])])


def _offload_policy(plan: ParallelPlan, device_type: str) -> OffloadPolicy:
    if plan.shard.offload == "none":
        return OffloadPolicy()
    # Memory can be pinned only for an accelerator. Without one, offloading copies nothing.
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return every module that FSDP2 manages, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def prepare_backward(model: nn.Module, plan: ShardPlan, *, is_last: bool) -> None:
    """Tell FSDP2 what the next backward pass of a model without a pipeline does.

    Args:
        model: with the modules that FSDP2 manages.
        plan: resolved. It says whether gathered parameters are kept until the last backward pass
            of a step, and whether gradients add up on this process until then.
        is_last: whether it is the backward pass of the last microbatch.
    """
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(is_last or plan.reduces_each_microbatch, recurse=False)
        # The parts of gradients are summed over dp_replicate once.
        module.set_requires_all_reduce(is_last, recurse=False)
        if plan.reshard_after_forward == "never":
            module.set_reshard_after_backward(is_last, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters after a forward pass without a backward pass.

    They would be out of date after the next optimizer step.
    """
    for module in fsdp_modules(model):
        module.reshard()


def is_gathered(parameter: nn.Parameter) -> bool:
    """Return whether `mark_gathered` has marked a parameter.

    It marks the parameters that FSDP2 puts in place of the sharded ones while these are gathered.
    """
    return hasattr(parameter, _GATHERED)


def mark_gathered(model: nn.Module) -> None:
    """Mark the parameters that are gathered now, so that `is_gathered` always recognizes them."""
    for module in fsdp_modules(model):
        for parameter in gathered_parameters(module):
            setattr(parameter, _GATHERED, True)


def abandon_backward(model: nn.Module) -> None:
    """Clear the state that a backward pass has left when it ended with an exception.

    Its gradients are lost. Otherwise FSDP2 would wait for the end of that pass forever, and would
    not reduce a gradient again.
    """
    for module in fsdp_modules(model):
        forget_gathered_gradients(module)
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
