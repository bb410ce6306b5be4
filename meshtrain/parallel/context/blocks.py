"""Blocks that compute on full sequences, of which each rank of cp then keeps its part.

Every rank computes the same there, so cp saves neither time nor memory inside of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshtrain.parallel.tensor.context import Inputs, change_input, change_output


def compute_in_full(
    block: nn.Module, join: Callable[[Tensor], Tensor], columns: Callable[[int], Tensor | None]
) -> None:
    """Give a block full sequences and the mask of their padding, by hooks.

    Args:
        block: changed in place. It gets the mask of a part by name.
        join: (batch, seq/cp, hidden) -> (batch, seq, hidden) of all ranks; the same tensor if
            sequences are not in parts.
        columns: length of a full sequence -> (seq/cp,) the columns of this rank; None if sequences
            are not in parts.
    """

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        args, kwargs = change_input(join, module, args, kwargs)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            # As a number: not every backend gathers bool.
            kwargs["attention_mask"] = join(mask.int().unsqueeze(-1)).squeeze(-1).to(mask.dtype)
        return args, kwargs

    def leave(output: Tensor) -> Tensor:
        own = columns(output.shape[1])
        return output if own is None else _OwnColumns.apply(output, own)  # type: ignore[no-untyped-call]

    # Outside of the hooks of tensor parallelism, which may split a part further.
    block.register_forward_pre_hook(enter, with_kwargs=True)
    block.register_forward_hook(partial(change_output, leave), prepend=True)


class _OwnColumns(torch.autograd.Function):
    """The columns of this rank; the gradients of the others come from the ranks that have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor) -> Tensor:
        ctx.shape, ctx.own = x.shape, own
        return x[:, own]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        full = gradient.new_zeros(ctx.shape)
        full[:, ctx.own] = gradient
        return full, None
