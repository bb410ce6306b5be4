"""Parts of a tensor along the sequence, which may overlap."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Range = tuple[int, int, int]
"""A row, the first column and the number of columns."""


def take_ranges(x: Tensor, ranges: Sequence[Range]) -> tuple[Tensor, ...]:
    """Return (1, heads, columns, width) for each range of a tensor (batch, heads, seq, width).

    The gradient of a slice is a tensor of the full size. Here all ranges share one.
    """
    return _Ranges.apply(x, ranges)  # type: ignore[no-untyped-call]


class _Ranges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: Sequence[Range]) -> tuple[Tensor, ...]:
        ctx.ranges, ctx.shape = ranges, x.shape
        return tuple(_part(x, it) for it in ranges)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].new_zeros(ctx.shape)
        for it, gradient in zip(ctx.ranges, gradients, strict=True):
            _part(total, it).add_(gradient)
        return total, None


def _part(x: Tensor, it: Range) -> Tensor:
    row, first, count = it
    return x[row : row + 1, :, first : first + count]
