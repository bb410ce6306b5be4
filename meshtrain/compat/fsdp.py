"""torch's FSDP2: its gathered parameters, and a hook before it reduces their gradients."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor


def _group(module: FSDPModule) -> FSDPParamGroup | None:
    return module._get_fsdp_state()._fsdp_param_group


def _held(module: FSDPModule) -> list[FSDPParam]:
    group = _group(module)
    return [] if group is None else group.fsdp_params


def _has_been_gathered(held: FSDPParam) -> bool:
    return hasattr(held, "_unsharded_param")


def gathered_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """Return the tensors that replace parameters while FSDP2 has them gathered.

    Parameters that were never gathered have none.

    Why: an optimizer that was made in between holds these, which nothing uses later. FSDP2 has no
    public name for them.
    Holds: torch 2.11 to 2.13.
    """
    return [held.unsharded_param for held in _held(module) if _has_been_gathered(held)]


def before_reduction(module: FSDPModule, function: Callable[[FSDPModule], None]) -> None:
    """Call a function with the module each time before FSDP2 reduces its gradients.

    Why: FSDP2 has no hook there. Its method is replaced in this one group, which lives as long as
    the module.
    Holds: torch 2.11 to 2.13.
    """
    group = _group(module)
    if group is None:
        return
    reduce = group.post_backward

    def post_backward(*arguments: Any) -> None:
        # It may be called again after the reduction.
        if group.reduce_grads and group._training_state != TrainingState.POST_BACKWARD:
            function(module)
        reduce(*arguments)

    group.post_backward = post_backward  # type: ignore[method-assign]


class Gathered(Protocol):
    """How parameters are sent when FSDP2 gathers them, in another number format than their own.

    Why: FSDP2 asks each parameter alone, and would send a message for each of them here.
    Holds: torch 2.11 to 2.13.
    """

    def encode(self, shards: Sequence[Tensor], group: dist.ProcessGroup) -> Sequence[tuple[Tensor, Tensor]]:
        """Return for each parameter what is sent, and what this process needs to decode all parts.

        Args:
            shards: the parts (elements,) of this process, padded.
            group: the processes that gather the parameters.
        """

    def decode(self, sent: Tensor, known: Tensor, into: Tensor) -> None:
        """Fill a gathered parameter.

        Args:
            sent: by all processes, of the shape of the parameter.
            known: what `encode` has returned beside it.
            into: the parameter.
        """


def gather_as(module: FSDPModule, parameters: Collection[nn.Parameter], form: Gathered) -> int:
    """Let FSDP2 send some parameters of a module in another number format.

    The gathered parameters have the number format of the computation, as ever.

    Why: FSDP2 finds its two functions for this as attributes of the local part of a parameter, for
    which it expects a class of tensors. Parameters stay plain tensors here, so that optimizers and
    checkpoints need not know. FSDP2 may replace the local part when it pads it.
    Holds: torch 2.11 to 2.13.

    Args:
        module: managed by FSDP2, before its first forward pass.
        parameters: sharded ones, of this module or others.
        form: of all of them.

    Returns:
        The number of parameters of this module among them.
    """
    wanted = [held for held in _held(module) if any(held.sharded_param is parameter for parameter in parameters)]
    together = _SentTogether(wanted, form)
    for held in wanted:
        held.reset_sharded_param = partial(together.reset, held)  # type: ignore[method-assign]
    return len(wanted)


class _SentTogether:
    """The functions with which FSDP2 gathers some parameters of one group."""

    def __init__(self, held: Sequence[FSDPParam], form: Gathered) -> None:
        self._all, self._form = held, form
        self._encoded: dict[FSDPParam, tuple[Tensor, Tensor]] = {}

    def reset(self, held: FSDPParam) -> None:
        FSDPParam.reset_sharded_param(held)
        local = held._sharded_local_tensor
        local.fsdp_pre_all_gather = partial(self._before, held)  # type: ignore[attr-defined]
        local.fsdp_post_all_gather = partial(self._after, held)  # type: ignore[attr-defined]

    def _before(self, held: FSDPParam, mesh: DeviceMesh) -> tuple[tuple[Tensor], Tensor]:
        # FSDP2 asks for the parameters in their order.
        if held is self._all[0]:
            shards = [it._sharded_param_data.to(it.device, non_blocking=True) for it in self._all]
            self._encoded = dict(zip(self._all, self._form.encode(shards, mesh.get_group()), strict=True))
        sent, known = self._encoded.pop(held)
        return (sent,), known

    @torch.no_grad()
    def _after(
        self,
        held: FSDPParam,
        sent: tuple[Tensor],
        known: Tensor,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor]]:
        shape = held._orig_size
        whole = torch.empty(shape, dtype=dtype, device=held.device) if out is None else _local(out)
        # The graph of a pass may have saved the parameter, whose values stay the same.
        with torch.autograd._unsafe_preserve_version_counter(whole):
            self._form.decode(sent[0].view(-1)[: shape.numel()].view(shape), known, whole)
        if known.is_cuda:
            # It was made on another stream, which must not reuse its memory before this is done.
            known.record_stream(torch.cuda.current_stream(known.device))
        free_storage(sent[0])
        return whole, (whole,)


def _local(parameter: Tensor) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


@contextmanager
def padded_once() -> Iterator[None]:
    """Let FSDP2 keep the parts of parameters that it has padded while the block runs.

    Why: before its first forward pass, FSDP2 compares addresses of memory to see whether a part is
    padded. Fake memory has no address, so a part would be copied to be padded once more.
    Holds: torch 2.11 to 2.13.
    """
    original = FSDPParam.reset_sharded_param
    FSDPParam.reset_sharded_param = lambda held: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPParam.reset_sharded_param = original  # type: ignore[method-assign]


def fill_lacking_gradients(module: FSDPModule, filled: set[nn.Parameter]) -> None:
    """Fill the missing gradients of gathered parameters with zeros, in the format of the others.

    `filled` is updated to the parameters whose only gradient is such zeros.

    Why: FSDP2 leaves parameters without a gradient out of its message, which would not match the
    message of a process that has one.
    Holds: torch 2.11 to 2.13.

    Args:
        filled: sharded parameters; changed in place.
    """
    group = _group(module)
    is_first = group is None or group._partial_reduce_output is None
    for held in _held(module):
        if not _lacks_gradient(held):
            filled.discard(held.sharded_param)
            continue
        held.unsharded_param.grad = torch.zeros_like(held.unsharded_param)
        # An earlier backward pass of the step may have added a gradient.
        if is_first and held.sharded_param.grad is None:
            filled.add(held.sharded_param)
    # FSDP2 keeps the gradients of earlier passes in the number format of the reduction, and one
    # message has one format.
    if any(held.unsharded_accumulated_grad is not None for held in _held(module)):
        for held in _held(module):
            if _has_been_gathered(held) and held.unsharded_accumulated_grad is None:
                held.to_accumulated_grad_if_needed()


def _lacks_gradient(held: FSDPParam) -> bool:
    # A parameter that no forward pass has gathered takes no part in the reduction, on any process.
    if not _has_been_gathered(held) or not held.unsharded_param.requires_grad:
        return False
    return held.unsharded_accumulated_grad is None and held.unsharded_param.grad is None


def forget_gathered_gradients(module: FSDPModule) -> None:
    """Remove the gradients of gathered parameters, which are not reduced yet.

    Why: a backward pass that has ended with an exception leaves them, and `zero_grad` does not see
    them.
    Holds: torch 2.11 to 2.13.
    """
    for held in _held(module):
        held.unsharded_accumulated_grad = None
        if _has_been_gathered(held):
            held.unsharded_param.grad = None


def unreduced_gradients(module: FSDPModule) -> list[Tensor]:
    """Return the gradients that FSDP2 keeps until it reduces them, or sums them over copies.

    Why: they are not in the `grad` of any parameter that a program sees.
    Holds: torch 2.11 to 2.13.
    """
    group = _group(module)
    found = [] if group is None else [group._partial_reduce_output]
    for held in _held(module):
        found.append(held.unsharded_accumulated_grad)
        if _has_been_gathered(held):
            found.append(held.unsharded_param.grad)
    return [gradient for gradient in found if gradient is not None]
