"""Collectives with gradients, on plain tensors.

Each is one function from tensor to tensor; its backward pass is the transposed collective. The
functions wait for their results, so that no asynchronous tensor reaches a compiled block, where
torch silently loses gradients.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshtrain.compat.operators import collectives as operators

Collective = Callable[[Tensor, ProcessGroup], Tensor]


def gather_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Join the tensors of all processes along a dimension, without a gradient."""
    stacked = operators.wait_tensor(operators.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return torch.cat(stacked.chunk(group.size()), dim)


def scatter_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this process's part of the sum over all processes, without a gradient."""
    stacked = torch.cat(x.chunk(group.size(), dim))
    return operators.wait_tensor(operators.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name))


class _Transposable(torch.autograd.Function):
    """A collective whose backward pass is the transposed collective, which has a gradient too."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: ProcessGroup, there: Collective, back: Collective
    ) -> Tensor:
        ctx.group, ctx.there, ctx.back = group, there, back  # type: ignore[attr-defined]
        return there(x, group)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        group, there, back = ctx.group, ctx.there, ctx.back  # type: ignore[attr-defined]
        # `create_graph=True` needs a derivative of the backward pass. The functional collectives of
        # torch have none and do not report it. Without `create_graph` the plain collective is
        # cheaper, and it can be compiled.
        if torch.is_grad_enabled():
            return _apply(gradient, group, back, there), None, None, None
        return back(gradient, group), None, None, None


_apply: Callable[[Tensor, ProcessGroup, Collective, Collective], Tensor] = _Transposable.apply


def pair_of(forward: Collective, transposed: Collective) -> tuple[Collective, Collective]:
    """Return two functions, each of which is the backward pass of the other.

    So gradients have gradients too.
    """

    def one(x: Tensor, group: ProcessGroup) -> Tensor:
        return _apply(x, group, forward, transposed)

    def other(x: Tensor, group: ProcessGroup) -> Tensor:
        return _apply(x, group, transposed, forward)

    return one, other
