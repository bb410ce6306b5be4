"""Shard parameters, gradients and optimizer state over the dp axes (FSDP2)."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshtrain.compat.fsdp import (
    before_reduction,
    fill_lacking_gradients,
    forget_gathered_gradients,
    gathered_parameters,
)
from meshtrain.config.plan import ParallelPlan
from meshtrain.parallel.cut.stage import Stage
from meshtrain.runtime.mesh import fsdp_mesh

_GATHERED = "meshtrain_gathered"


def needs_fsdp(plan: ParallelPlan) -> bool:
    """Return whether a plan needs FSDP2: to shard, to offload, or for several number formats.

    Otherwise FSDP2 would only add a copy of every parameter and gradient per step.
    """
    precision = plan.precision
    several_formats = len({precision.parameters, precision.activations, precision.reduce}) > 1
    return plan.mesh.is_sharded or several_formats or plan.shard.offload == "cpu"


def parameter_device(plan: ParallelPlan, device: torch.device) -> torch.device:
    """Return the device that holds parameters, gradients and optimizer state between uses."""
    return torch.device("cpu") if plan.shard.offload == "cpu" else device


def apply_shard(stage: Stage, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    """Shard a stage in place, layer by layer, if `needs_fsdp` is true for the plan."""
    if not needs_fsdp(plan):
        return
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, plan.precision.activations), reduce_dtype=getattr(torch, plan.precision.reduce)
    )
    offload = _offload_policy(plan, mesh.device_type)
    data_mesh = fsdp_mesh(mesh)
    reshard = plan.shard.reshard_after_forward == "always"
    shard = partial(
        fully_shard, mesh=data_mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload
    )
    # Two groups of FSDP2 that share a parameter would lose gradients without an error. So what
    # several layers share belongs to the stage.
    shared = _shared_parameters(stage.own_layers())
    for layer in stage.own_layers():
        shard(layer, ignored_params=shared)
    shard(stage.model)
    for module in fsdp_modules(stage.model):
        # The loss is divided once, by the token count of all processes, so gradients are summed.
        # Without the forced sum, torch would use a pre-multiplied reduction, which gloo lacks.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # A parameter may lack a gradient on this process alone: an expert may get tokens elsewhere
        # only.
        before_reduction(module, partial(fill_lacking_gradients, filled=stage.filled))


def _shared_parameters(layers: Sequence[nn.Module]) -> set[nn.Parameter]:
    counts = Counter(parameter for layer in layers for parameter in layer.parameters())
    return {parameter for parameter, count in counts.items() if count > 1}


def _offload_policy(plan: ParallelPlan, device_type: str) -> OffloadPolicy:
    if plan.shard.offload == "none":
        return OffloadPolicy()
    # Memory can be pinned only for an accelerator. Without one, offloading copies nothing.
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return every module that FSDP2 manages, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def defer_reduction(model: nn.Module, *, is_last: bool, keep_gathered: bool) -> None:
    """Let gradients add up on this process until the last microbatch of a step.

    Args:
        model: with the modules that FSDP2 manages.
        is_last: whether the next backward pass is that of the last microbatch.
        keep_gathered: keep gathered parameters in memory until that pass as well.
    """
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(is_last, recurse=False)
        if keep_gathered:
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
