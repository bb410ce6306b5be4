"""The product of a linear layer in float8, forward and backward.

Each of its three matrix products scales both factors to the range of float8, casts them, and
multiplies them with torch's kernel, into bfloat16. Scales are powers of two: they round nothing, so
a tensor and a shard of it, which may have different scales, round to the same values, except for
values near zero.

A CPU has no such kernels: those of torch convert both factors to float32. There the values are
multiplied in bfloat16, which holds them exactly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from meshtrain.compat.operators import rows_as, scaled_product
from meshtrain.config.plan import Float8Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The scale of a tensor of zeros would be infinite.
SMALLEST = 2.0**-100
# The bits of the exponent of a float32.
_EXPONENT = 0x7F800000
# Values of a row that share a scale.
BLOCK = 32
# The kernels for blocks read the scales of so many rows and blocks together.
_SCALE_ROWS, _SCALE_BLOCKS = 128, 4
# torch.compile reads no ContextVar without a break in the graph.
_as_on_gpus = False


class Recipe(NamedTuple):
    """How the factors of a product are scaled and cast.

    Attributes:
        scaling: what has a scale: a factor, each row of the first factor and each column of the
            second, or each block of 32 values in these.
        gradients: number format of the gradients of outputs. All else is in e4m3.
        multiple: the kernels need it to divide the inner dimension of a product, and the last of
            its result.
    """

    scaling: ScalingType
    gradients: torch.dtype
    multiple: int


RECIPES: dict[Float8Recipe, Recipe] = {
    "rowwise": Recipe(ScalingType.RowWise, E4M3, 16),
    "tensorwise": Recipe(ScalingType.TensorWise, E5M2, 16),
    "mxfp8": Recipe(ScalingType.BlockWise1x32, E4M3, BLOCK),
}


@contextmanager
def products_as_on_gpus() -> Iterator[None]:
    """Multiply fake tensors of a CPU with the kernels for GPUs, while the block runs."""
    global _as_on_gpus
    before, _as_on_gpus = _as_on_gpus, True
    try:
        yield
    finally:
        _as_on_gpus = before


def float8_linear(recipe: Recipe, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias (batch, seq, out), with the products in float8.

    Args:
        recipe: how factors are scaled and cast.
        x: (batch, seq, in), bfloat16; there may be more or fewer dimensions in front.
        weight: (out, in), bfloat16. Both are multiples of `recipe.multiple`.
        bias: (out,), bfloat16.

    Source: FP8 formats for deep learning (arXiv:2209.05433); for blocks, OCP microscaling formats
    (MX) 1.0, with scales under which no value is cut off.
    """
    rows: Tensor = _Float8Product.apply(x.reshape(-1, x.shape[-1]), weight, recipe)  # type: ignore[no-untyped-call]
    y = rows_as(rows, (*x.shape[:-1], weight.shape[0]))
    return y if bias is None else y + bias


class _Float8Product(torch.autograd.Function):
    """x @ weight.T of (tokens, in) and (out, in).

    The backward pass casts its factors again, along other dimensions. So what is kept for it is
    what bfloat16 keeps, which other layers with the same input share.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        of_x, of_weight = _cast(_padded(x, recipe), E4M3, recipe), _cast(weight, E4M3, recipe)
        scales = (of_x.scales, of_weight.scales) if recipe.scaling is ScalingType.TensorWise else (None, None)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, *scales)
        ctx.recipe, ctx.num_tokens = recipe, x.shape[0]
        y = _multiply(of_x, of_weight, recipe, is_fast=True)
        # A view may not be changed in place, which some classes do.
        return y if len(y) == len(x) else y[: len(x)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale_of_x, scale_of_weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        recipe = ctx.recipe
        gradient = _padded(gradient, recipe)
        of_gradient = _cast(gradient, recipe.gradients, recipe) if needs_x else None
        of_x = of_weight = None
        if of_gradient is not None:
            of_x = _multiply(of_gradient, _cast(weight.T, E4M3, recipe, scale_of_weight), recipe)[: ctx.num_tokens]
        if needs_weight:
            known = of_gradient.scales if of_gradient is not None and scale_of_x is not None else None
            rows = _cast(gradient.T, recipe.gradients, recipe, known)
            of_weight = _multiply(rows, _cast(_padded(x, recipe).T, E4M3, recipe, scale_of_x), recipe)
        return of_x, of_weight, None


class _Scaled(NamedTuple):
    """A matrix in float8: `values` times `scales`.

    Attributes:
        values: (rows, columns), float8, contiguous.
        scales: (rows, 1), (), or for blocks (rows, columns / 32), float32.
    """

    values: Tensor
    scales: Tensor


def _padded(matrix: Tensor, recipe: Recipe) -> Tensor:
    """Return a matrix with rows of zeros, which add nothing, up to a multiple of tokens."""
    multiple = recipe.multiple
    missing = max(multiple, -(-matrix.shape[0] // multiple) * multiple) - matrix.shape[0]
    return F.pad(matrix, (0, 0, 0, missing)) if missing else matrix


def _cast(matrix: Tensor, dtype: torch.dtype, recipe: Recipe, scales: Tensor | None = None) -> _Scaled:
    """Return a matrix in float8, with the largest values near the end of its range.

    Args:
        matrix: (rows, columns).
        dtype: of the values.
        recipe: what has a scale.
        scales: if they are known.
    """
    is_by_block = recipe.scaling is ScalingType.BlockWise1x32
    rows = matrix.reshape(matrix.shape[0], -1, BLOCK) if is_by_block else matrix
    if scales is None:
        sizes = rows.abs()
        largest = sizes.amax() if recipe.scaling is ScalingType.TensorWise else sizes.amax(-1, keepdim=True)
        factors = scale_for(largest.float(), dtype)
        scales = factors.reciprocal()
    else:
        factors = scales.reciprocal()
    values = (rows * factors.to(matrix.dtype)).to(dtype).contiguous().view(matrix.shape)
    return _Scaled(values, scales.squeeze(-1) if is_by_block else scales)


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors that bring the largest absolute values, float32, near the end of a format.

    Each is a power of two.
    """
    return _power_of_two(torch.finfo(dtype).max / largest.clamp(min=SMALLEST))


def _power_of_two(numbers: Tensor) -> Tensor:
    """Return the largest powers of two that are not above positive float32 numbers."""
    return (numbers.view(torch.int32) & _EXPONENT).view(torch.float32)


def _multiply(first: _Scaled, second: _Scaled, recipe: Recipe, *, is_fast: bool = False) -> Tensor:
    """Return first @ second.T in bfloat16.

    Args:
        first: (rows, inner).
        second: (columns, inner).
        recipe: how they were scaled.
        is_fast: whether sums may have fewer digits than float32, where the kernel has that choice.
            Gradients need the digits.
    """
    if first.values.device.type == "cpu" and not _as_on_gpus:
        return _exact_values(first, recipe) @ _exact_values(second, recipe).T
    of_first, of_second = first.scales, second.scales
    if recipe.scaling is ScalingType.RowWise:
        of_second = of_second.T.contiguous()
    elif recipe.scaling is ScalingType.BlockWise1x32:
        of_first, of_second = _swizzled(of_first), _swizzled(of_second)
        # The kernel for blocks has no such choice.
        is_fast = False
    return scaled_product(first.values, second.values.T, (of_first, of_second), is_fast=is_fast)


def _exact_values(matrix: _Scaled, recipe: Recipe) -> Tensor:
    """Return the values of a matrix in bfloat16, which holds them exactly."""
    values, scales = matrix.values.to(torch.bfloat16), matrix.scales.to(torch.bfloat16)
    if recipe.scaling is not ScalingType.BlockWise1x32:
        return values * scales
    return (values.view(*scales.shape, BLOCK) * scales.unsqueeze(-1)).view(values.shape)


def _swizzled(scales: Tensor) -> Tensor:
    """Return the scales of blocks (rows, blocks) as the kernel reads them, flat, in 8 bits.

    Tiles of 128 rows and 4 blocks lie one after the other. In a tile, the rows 0, 32, 64 and 96 lie
    beside each other, then 1, 33, 65 and 97.

    Source: cuBLAS, layout of 1D block scaling factors.
    """
    rows, blocks = scales.shape
    scales = F.pad(scales, (0, -blocks % _SCALE_BLOCKS, 0, -rows % _SCALE_ROWS))
    tiles = scales.view(scales.shape[0] // _SCALE_ROWS, 4, 32, scales.shape[1] // _SCALE_BLOCKS, _SCALE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).flatten().to(torch.float8_e8m0fnu)
