"""Parameters as a stock optimizer wants them: plain tensors over the local parts of DTensors.

Elementwise arithmetic needs no layout: each process updates what lies on it, the optimizer's state is plain tensors of
the local shape, and torch's fused and foreach kernels apply, which take no mixture of plain tensors and DTensors. The
layout of a state is that of the whole parameter.
"""

import sys
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshtrain.compat.autograd import tensor_over
from meshtrain.compat.dtensor import local_part, tensor_like
from meshtrain.errors import ModelError
from meshtrain.models.layout import local_tensor

# What in torch decides by all gradients together, and would see those of this process only: module -> name, advice.
_SEES_A_PART = {
    "torch.nn.utils.clip_grad": (
        "clip_grad_norm_",
        "torch's clip_grad_norm_ would take the norm of what lies on this rank, another one on each; call "
        "meshtrain.clip_grad_norm(model, max_norm)",
    ),
    "torch.amp.grad_scaler": (
        "GradScaler",
        "torch's GradScaler would leave a step out on the ranks alone whose part of the gradients is not finite; take "
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, and call its unscale_ before its step",
    ),
}


class LocalParameter(nn.Parameter):
    """A parameter over the same memory as the local part of `whole`, whose gradient is the local part of `whole`'s.

    It never has a gradient of its own, so nothing has to be carried from one to the other. Gradient hooks belong on
    `whole`: autograd does not see this tensor. It is not shown to torch's `clip_grad_norm_` and `GradScaler`, which
    must decide alike on all processes.

    Args:
        whole: its local part must stay where it is in memory.

    Attributes:
        whole: the parameter of the model.
    """

    whole: DTensor

    def __new__(cls, whole: DTensor) -> Self:
        """Make it share the memory of `whole`."""
        local = tensor_over(cls, local_tensor(whole.detach()), requires_grad=whole.requires_grad)
        local.whole = whole
        return local

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refuse: a copy would be a part of no model.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "an optimizer of a parallel model cannot be copied: its parameters are parts of the model's; make a new "
            "optimizer, and load the state_dict of this one into it"
        )

    @property
    def grad(self) -> Tensor | None:
        """The local part of the whole parameter's gradient; it shares its memory.

        Raises:
            ModelError: if a function of torch asks that must see all gradients.
        """
        gradient, whole = self.whole.grad, self.whole
        if gradient is None:
            return None
        _check_reader(sys._getframe(1))
        assert isinstance(gradient, DTensor)
        if gradient.placements != whole.placements:
            # Autograd may leave it in the layout of what was computed with the parameter: whole, or yet to be summed.
            # Kept, so that what is done to the local part in place is done to the gradient.
            with torch.no_grad():
                gradient = whole.grad = gradient.redistribute(placements=whole.placements)
        return local_part(gradient)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is None:
            self.whole.grad = None
            return
        found, wanted = _kind(gradient), _kind(self)
        if isinstance(gradient, DTensor) or found != wanted:
            what = "DTensor" if isinstance(gradient, DTensor) else "tensor"
            raise ModelError(
                f"the gradient of a local part must be a plain tensor: {wanted}; this is a {what}: {found}. Give the "
                "part that lies on this process, or set the gradient of the model's parameter"
            )
        self.whole.grad = laid_out_as(gradient, self.whole)

    @grad.deleter
    def grad(self) -> None:
        self.whole.grad = None


def _check_reader(frame: FrameType) -> None:
    # A mistake that nothing else would show: what torch computes of parts are numbers like any others.
    reader, advice = _SEES_A_PART.get(frame.f_globals.get("__name__", ""), ("", ""))
    if reader and frame.f_code.co_qualname.startswith(reader):
        raise ModelError(advice)


def as_local(parameter: nn.Parameter) -> nn.Parameter:
    """Return the local part of a parameter as an optimizer wants it; the parameter itself if it is no DTensor."""
    return LocalParameter(parameter) if isinstance(parameter, DTensor) else parameter


def whole_of(parameter: Tensor) -> Tensor:
    """Return the model's parameter that an optimizer's parameter is a part of; itself if it is no LocalParameter."""
    return parameter.whole if isinstance(parameter, LocalParameter) else parameter


def laid_out_as(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor over the memory of `local`, laid out as `parameter`, of whose local part it has the shape."""
    return tensor_like(local, parameter) if isinstance(parameter, DTensor) else local


def choose_kernels(optimizer: Optimizer) -> None:
    """Give a torch optimizer the kernels that torch chooses by itself for parameters that are no LocalParameter.

    On an accelerator that is `foreach`, and torch does not choose it for a subclass of Parameter.
    """
    for group in optimizer.param_groups:
        is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
        is_barred = group.get("differentiable") or isinstance(group.get("lr"), Tensor)
        parameters = group["params"]
        if is_open and not is_barred and all(p.device.type in ("cuda", "xpu") for p in parameters):
            group["foreach"] = True


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
