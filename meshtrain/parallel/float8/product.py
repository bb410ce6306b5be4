"""The product of a linear layer in float8, forward and backward.

Each of its three matrix products scales both factors to the range of float8, casts them, and
multiplies them with the kernel that torch has for the device, into bfloat16. Scales are powers of
two: they round nothing, so a tensor and a shard of it, which may have different scales, round to
the same values, except for values near zero.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from meshtrain.config.plan import Float8Recipe

MULTIPLE = 16
"""The kernels need it to divide the inner dimension of a product, and the last of its result."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The scale of a tensor of zeros would be infinite.
SMALLEST = 2.0**-100
# The bits of the exponent of a float32.
_EXPONENT = 0x7F800000


class Recipe(NamedTuple):
    """How the factors of a product are scaled and cast.

    Attributes:
        by_row: whether each row of the first factor, and each column of the second, has a scale.
            Otherwise a factor has one.
        gradients: number format of the gradients of outputs. All else is in e4m3.
    """

    by_row: bool
    gradients: torch.dtype


RECIPES: dict[Float8Recipe, Recipe] = {
    "rowwise": Recipe(by_row=True, gradients=E4M3),
    "tensorwise": Recipe(by_row=False, gradients=E5M2),
}


def float8_linear(recipe: Recipe, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias (batch, seq, out), with the products in float8.

    Args:
        recipe: how factors are scaled and cast.
        x: (batch, seq, in), bfloat16; there may be more or fewer dimensions in front.
        weight: (out, in), bfloat16. Both are multiples of `MULTIPLE`.
        bias: (out,), bfloat16.

    Source: FP8 formats for deep learning (arXiv:2209.05433).
    """
    y = _Float8Product.apply(x.reshape(-1, x.shape[-1]), weight, recipe).view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


class _Float8Product(torch.autograd.Function):
    """x @ weight.T of (tokens, in) and (out, in).

    The backward pass casts its factors again, along other dimensions. So what is kept for it is
    what bfloat16 keeps, which other layers with the same input share.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.recipe, ctx.num_tokens = recipe, x.shape[0]
        y = _multiply(_cast(_padded(x), E4M3, recipe), _cast(weight, E4M3, recipe))
        return y[: x.shape[0]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        recipe, gradient = ctx.recipe, _padded(gradient)
        of_x = of_weight = None
        if needs_x:
            of_x = _multiply(_cast(gradient, recipe.gradients, recipe), _cast(weight.T, E4M3, recipe))[: ctx.num_tokens]
        if needs_weight:
            of_weight = _multiply(_cast(gradient.T, recipe.gradients, recipe), _cast(_padded(x).T, E4M3, recipe))
        return of_x, of_weight, None


class _Scaled(NamedTuple):
    """A matrix in float8: `values` times `scales`.

    Attributes:
        values: (rows, columns), float8, contiguous.
        scales: (rows, 1) or (), float32.
    """

    values: Tensor
    scales: Tensor


def _padded(matrix: Tensor) -> Tensor:
    """Return a matrix with rows of zeros, which add nothing, up to a multiple of 16 tokens."""
    missing = max(MULTIPLE, -(-matrix.shape[0] // MULTIPLE) * MULTIPLE) - matrix.shape[0]
    return F.pad(matrix, (0, 0, 0, missing)) if missing else matrix


def _cast(matrix: Tensor, dtype: torch.dtype, recipe: Recipe) -> _Scaled:
    """Return a matrix in float8, with the largest values near the end of its range."""
    sizes = matrix.abs()
    largest = (sizes.amax(dim=1, keepdim=True) if recipe.by_row else sizes.amax()).float()
    factors = _power_of_two(torch.finfo(dtype).max / largest.clamp(min=SMALLEST))
    values = (matrix * factors.to(matrix.dtype)).to(dtype).contiguous()
    return _Scaled(values, factors.reciprocal())


def _power_of_two(numbers: Tensor) -> Tensor:
    """Return the largest powers of two that are not above positive float32 numbers."""
    return (numbers.view(torch.int32) & _EXPONENT).view(torch.float32)


def _multiply(first: _Scaled, second: _Scaled) -> Tensor:
    """Return first @ second.T in bfloat16."""
    by_row = first.scales.dim() == 2
    scaling = ScalingType.RowWise if by_row else ScalingType.TensorWise
    scales = second.scales.T.contiguous() if by_row else second.scales
    return F.scaled_mm(
        first.values, second.values.T, first.scales, scaling, scales, scaling, output_dtype=torch.bfloat16
    )
