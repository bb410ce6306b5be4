"""Sharding of parameters, gradients and optimizer state over the dp axes (FSDP2)."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from meshtrain.config.plan import ParallelPlan
from meshtrain.parallel.cut import Stage
from meshtrain.runtime.mesh import fsdp_mesh

_GATHERED = "meshtrain_gathered"


def needs_fsdp(plan: ParallelPlan) -> bool:
    """Return whether FSDP2 has something to do: parameters to shard or offload, or more than one number format to keep.

    Otherwise it would only copy every parameter and gradient once more per step.
    """
    precision = plan.precision
    several_formats = len({precision.parameters, precision.compute, precision.reduce}) > 1
    return plan.mesh.is_sharded or several_formats or plan.shard.offload == "cpu"


def parameter_device(plan: ParallelPlan, device: torch.device) -> torch.device:
    """Return where parameters, gradients and optimizer state lie between uses."""
    return torch.device("cpu") if plan.shard.offload == "cpu" else device


def apply_shard(stage: Stage, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    """Shard a stage, layer by layer, in place, where `needs_fsdp`."""
    if not needs_fsdp(plan):
        return
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, plan.precision.compute), reduce_dtype=getattr(torch, plan.precision.reduce)
    )
    offload = _offload_policy(plan, mesh.device_type)
    data_mesh = fsdp_mesh(mesh)
    reshard = plan.shard.reshard_after_forward == "always"
    for layer in stage.own_layers():
        fully_shard(layer, mesh=data_mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
    fully_shard(stage.model, mesh=data_mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
    for module in fsdp_modules(stage.model):
        # The loss is divided once, by the token count of all processes: gradients are summed and not averaged. The
        # forced sum keeps torch from a pre-multiplied reduction, which gloo does not have.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        _fill_before_reduction(module, stage.filled)


def _fill_before_reduction(module: FSDPModule, filled: set[nn.Parameter]) -> None:
    """Give a parameter without a gradient zeros before FSDP2 reduces, and add it to `filled`.

    FSDP2 leaves it out of its message: where another process has a gradient (an expert that got a token only there),
    the messages would not fit together.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    reduce = group.post_backward

    def post_backward(*arguments: Any) -> None:
        # It may be called again when it is done.
        if group.reduce_grads and group._training_state != TrainingState.POST_BACKWARD:
            for held in group.fsdp_params:
                if _lacks_gradient(held):
                    held.unsharded_param.grad = torch.zeros_like(held.unsharded_param)
                    # Of two forward passes before one backward pass, another may have given it one.
                    if held.sharded_param.grad is None:
                        filled.add(held.sharded_param)
                else:
                    filled.discard(held.sharded_param)
        reduce(*arguments)

    group.post_backward = post_backward  # type: ignore[method-assign]


def _lacks_gradient(held: FSDPParam) -> bool:
    # What no forward pass has gathered takes no part in the reduction, on any process.
    if not hasattr(held, "_unsharded_param") or not held.unsharded_param.requires_grad:
        return False
    return held.unsharded_accumulated_grad is None and held.unsharded_param.grad is None


def _offload_policy(plan: ParallelPlan, device_type: str) -> OffloadPolicy:
    if plan.shard.offload == "none":
        return OffloadPolicy()
    # Memory can be pinned for an accelerator only; without one the same path copies nothing.
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return every module that FSDP2 manages, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def defer_reduction(model: nn.Module, *, is_last: bool, keep_gathered: bool) -> None:
    """Let gradients add up on this process until the last microbatch of a step.

    Args:
        is_last: whether the next backward pass is that of the last microbatch.
        keep_gathered: do not free gathered parameters before it either.
    """
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(is_last, recurse=False)
        if keep_gathered:
            module.set_reshard_after_backward(is_last, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters: after a forward without a backward they would go stale at the next optimizer step."""
    for module in fsdp_modules(model):
        module.reshard()


def is_gathered(parameter: nn.Parameter) -> bool:
    """Whether this is what FSDP2 puts in the place of a parameter while it is gathered, and `mark_gathered` saw it."""
    return hasattr(parameter, _GATHERED)


def mark_gathered(model: nn.Module) -> None:
    """Let what is gathered now be recognised for ever."""
    for module in fsdp_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        for held in group.fsdp_params if group is not None else ():
            if hasattr(held, "_unsharded_param"):
                setattr(held._unsharded_param, _GATHERED, True)


def abandon_backward(model: nn.Module) -> None:
    """Clear away what a backward pass has left that has ended with an exception; its gradients are lost.

    FSDP2 would wait for its end for ever, and reduce no gradient again.
    """
    for module in fsdp_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        for held in group.fsdp_params if group is not None else ():
            held.unsharded_accumulated_grad = None
            if hasattr(held, "_unsharded_param"):
                held.unsharded_param.grad = None
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
