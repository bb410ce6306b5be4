"""Parameters for a stock optimizer: plain tensors in the memory of the local parts of DTensors.

An elementwise update needs no layout, so each process updates its own part. The optimizer's state
consists of plain tensors of the local shape, laid out as the full parameter is. torch's fused and
foreach kernels can be used. They do not accept a mixture of plain tensors and DTensors.
"""

import sys
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshtrain.compat.autograd import tensor_over
from meshtrain.compat.dtensor import local_part, tensor_like, tensor_of_shape_like, tensor_reduced_like
from meshtrain.errors import ModelError, Problem
from meshtrain.models.dtypes import dtype_name
from meshtrain.models.layout import blocks_shape, local_tensor

# Functions and classes of torch that need all gradients, but would see only those of this process:
# module -> name, problem.
_SEES_A_PART = {
    "torch.nn.utils.clip_grad": (
        "clip_grad_norm_",
        Problem(
            "torch's clip_grad_norm_ would return the norm of the local parts, which differs between ranks",
            "call meshtrain.clip_grad_norm(model, max_norm)",
        ),
    ),
    "torch.amp.grad_scaler": (
        "GradScaler",
        Problem(
            "torch's GradScaler would skip a step only on the ranks whose part of the gradients is not finite",
            "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, and call its unscale_ before its step",
        ),
    ),
}


class LocalParameter(nn.Parameter):
    """A parameter in the memory of the local part of a DTensor, whose gradient is a local part too.

    It stores no gradient of its own, so no gradient has to be copied between the two. Gradient
    hooks must be registered on `full`, because autograd does not use this tensor. torch's
    `clip_grad_norm_` and `GradScaler` must decide the same on all processes, so they cannot read
    its gradient.

    Args:
        full: the parameter of the model. Its local part must keep its address in memory.

    Attributes:
        full: the parameter of the model.
    """

    full: DTensor

    def __new__(cls, full: DTensor) -> Self:
        """Create a parameter that shares the memory of `full`."""
        local = tensor_over(cls, local_tensor(full.detach()), requires_grad=full.requires_grad)
        local.full = full
        return local

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refuse to copy, because a copy would belong to no model.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "an optimizer of a parallel model cannot be copied: its parameters are parts of the model's",
            "make a new optimizer, and load the state_dict of this one into it",
        )

    @property
    def grad(self) -> Tensor | None:
        """Return the local part of the full parameter's gradient, which shares its memory.

        Raises:
            ModelError: if the caller is a function of torch that needs all gradients.
        """
        gradient, full = self.full.grad, self.full
        if gradient is None:
            return None
        _check_reader(sys._getframe(1))
        assert isinstance(gradient, DTensor)
        if gradient.placements != full.placements:
            # Autograd may leave the gradient in the layout of the computation: replicated, or not
            # yet summed. The new layout is stored, so that a change of the local part in place
            # changes the gradient.
            with torch.no_grad():
                gradient = full.grad = gradient.redistribute(placements=full.placements)
        return local_part(gradient)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is None:
            self.full.grad = None
            return
        found, wanted = _kind(gradient), _kind(self)
        if isinstance(gradient, DTensor) or found != wanted:
            what = "DTensor" if isinstance(gradient, DTensor) else "tensor"
            raise ModelError(
                f"the gradient of a local part must be a plain tensor: {wanted}; this is a {what}: {found}",
                "pass the local part, or set the gradient of the model's parameter",
            )
        self.full.grad = laid_out_as(gradient, self.full)

    @grad.deleter
    def grad(self) -> None:
        self.full.grad = None


def _check_reader(frame: FrameType) -> None:
    # Nothing else would show this mistake, because what torch computes from parts looks valid.
    reader, problem = _SEES_A_PART.get(frame.f_globals.get("__name__", ""), (None, None))
    if reader is not None and problem is not None and frame.f_code.co_qualname.startswith(reader):
        raise ModelError(problem)


def as_local(parameter: nn.Parameter) -> nn.Parameter:
    """Return the local part of a parameter for an optimizer; a plain one is returned itself."""
    return LocalParameter(parameter) if isinstance(parameter, DTensor) else parameter


def full_parameter(parameter: Tensor) -> Tensor:
    """Return the model's parameter to which an optimizer's parameter belongs.

    A tensor that is not a LocalParameter is returned itself.
    """
    return parameter.full if isinstance(parameter, LocalParameter) else parameter


def laid_out_as(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor that shares the memory of `local` and has the layout of `parameter`.

    Args:
        local: has the shape of the local part of `parameter`.
        parameter: plain or DTensor.
    """
    return tensor_like(local, parameter) if isinstance(parameter, DTensor) else local


def laid_out_as_reduced(local: Tensor, parameter: Tensor, dim: int) -> Tensor:
    """Return the same for a tensor that has size 1 in a dimension, and otherwise the shape."""
    return tensor_reduced_like(local, parameter, dim) if isinstance(parameter, DTensor) else local


def laid_out_as_blocks(local: Tensor, parameter: Tensor, size: int) -> Tensor:
    """Return the same for a tensor with one number for each block of the last dimension."""
    if not isinstance(parameter, DTensor):
        return local
    return tensor_of_shape_like(local, parameter, blocks_shape(parameter.shape, size))


def choose_kernels(optimizer: Optimizer) -> None:
    """Set the kernels of a torch optimizer to those that torch chooses for ordinary parameters.

    On an accelerator that is `foreach`. torch does not choose it for a subclass of Parameter.
    """
    for group in optimizer.param_groups:
        is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
        is_barred = group.get("differentiable") or isinstance(group.get("lr"), Tensor)
        parameters = group["params"]
        if is_open and not is_barred and all(p.device.type in ("cuda", "xpu") for p in parameters):
            group["foreach"] = True


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)} on {tensor.device}"
