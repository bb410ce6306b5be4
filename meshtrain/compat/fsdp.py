"""torch's FSDP2: its parameters while they are gathered, and the moment before it reduces their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def _group(module: FSDPModule) -> FSDPParamGroup | None:
    return module._get_fsdp_state()._fsdp_param_group


def _held(module: FSDPModule) -> list[FSDPParam]:
    group = _group(module)
    return [] if group is None else group.fsdp_params


def _has_been_gathered(held: FSDPParam) -> bool:
    return hasattr(held, "_unsharded_param")


def gathered_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """Return what FSDP2 puts in the place of parameters while they are gathered, of those that ever were.

    Why: an optimizer that was made in between holds these, which train nothing. FSDP2 does not name them.
    Holds: torch 2.11 to 2.13.
    """
    return [held.unsharded_param for held in _held(module) if _has_been_gathered(held)]


def before_reduction(module: FSDPModule, function: Callable[[FSDPModule], None]) -> None:
    """Call a function with the module before FSDP2 reduces its gradients, in every backward pass in which it does.

    Why: FSDP2 has no hook there. Its method is replaced in this one group, which lives as long as the module.
    Holds: torch 2.11 to 2.13.
    """
    group = _group(module)
    if group is None:
        return
    reduce = group.post_backward

    def post_backward(*arguments: Any) -> None:
        # It may be called again when it is done.
        if group.reduce_grads and group._training_state != TrainingState.POST_BACKWARD:
            function(module)
        reduce(*arguments)

    group.post_backward = post_backward  # type: ignore[method-assign]


def fill_lacking_gradients(module: FSDPModule, filled: set[nn.Parameter]) -> None:
    """Give gathered parameters without a gradient zeros; `filled` becomes those that have no other gradient.

    Why: FSDP2 leaves them out of its message, which would not fit that of a process that has a gradient.
    Holds: torch 2.11 to 2.13.

    Args:
        filled: sharded parameters; changed in place.
    """
    for held in _held(module):
        if not _lacks_gradient(held):
            filled.discard(held.sharded_param)
            continue
        held.unsharded_param.grad = torch.zeros_like(held.unsharded_param)
        # Of two forward passes before one backward pass, another may have given it one.
        if held.sharded_param.grad is None:
            filled.add(held.sharded_param)


def _lacks_gradient(held: FSDPParam) -> bool:
    # What no forward pass has gathered takes no part in the reduction, on any process.
    if not _has_been_gathered(held) or not held.unsharded_param.requires_grad:
        return False
    return held.unsharded_accumulated_grad is None and held.unsharded_param.grad is None


def forget_gathered_gradients(module: FSDPModule) -> None:
    """Forget the gradients of gathered parameters, which are not reduced yet.

    Why: a backward pass that has ended with an exception leaves them, and `zero_grad` does not see them.
    Holds: torch 2.11 to 2.13.
    """
    for held in _held(module):
        held.unsharded_accumulated_grad = None
        if _has_been_gathered(held):
            held.unsharded_param.grad = None
