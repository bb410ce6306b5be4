"""Operators of torch under private names: for lists of tensors, functional collectives and aten."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.compat import varlen

collectives: Any = torch.ops._c10d_functional
"""The operators under torch's functional collectives.

Why: the Python functions around them are private as well, are renamed between releases, and return
asynchronous tensors, whose gradients a compiled block loses.
Holds: torch 2.11 to 2.13.
"""

_aten: Any = torch.ops.aten


def scaled_product(first: Tensor, second: Tensor, scales: tuple[Tensor, Tensor], *, is_fast: bool) -> Tensor:
    """Return the product of two matrices in float8, in bfloat16.

    Args:
        first: (rows, inner).
        second: (inner, columns), with the inner dimension contiguous.
        scales: of both. Their shapes tell what has a scale.
        is_fast: whether sums may have fewer digits than float32.

    Why: the public function calls an operator that torch 2.11 cannot compile, so each product
    would break the graph, and torch 2.13 cannot compile it for blocks.
    Holds: torch 2.11 to 2.13.
    """
    return torch._scaled_mm(first, second, *scales, out_dtype=torch.bfloat16, use_fast_accum=is_fast)


OF_MANY_TENSORS = ("_foreach_", "_fused_")
"""How the names of operators begin that do the same with each tensor of some lists.

Why: torch has no other mark for them.
Holds: torch 2.11 to 2.13.
"""

VIEWS: tuple[Any, ...] = (_aten.view, _aten._unsafe_view)
"""The operators that `Tensor.view` and `Tensor.reshape` call.

Why: aten uses a private name for the view of the result of a matrix product.
Holds: torch 2.11 to 2.13.
"""


def rows_as(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a new matrix in another shape, as a tensor that autograd does not count as a view.

    Args:
        rows: (rows, columns), which nobody else has.
        shape: of the result.

    Why: a view of what a function of one's own has computed may not be changed in place, and FSDP2
    warns of views. torch does the same with the matrix product inside `linear`.
    Holds: torch 2.11 to 2.13.
    """
    result: Tensor = _aten._unsafe_view(rows, shape)
    return result


CASTS: tuple[Any, ...] = (_aten._to_copy,)
"""The operators that `Tensor.to` calls.

Why: aten has it under a private name only.
Holds: torch 2.11 to 2.13.
"""

EXPENSIVE: tuple[Any, ...] = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    varlen.OPERATOR,
    collectives.all_reduce.default,
    collectives.all_gather_into_tensor.default,
    collectives.reduce_scatter_tensor.default,
    collectives.all_to_all_single.default,
)
"""Matrix products, attention (on every device that torch has a kernel for) and collectives.

Why: selective recomputation keeps their results. It selects by operator, and most have private
names.
Holds: torch 2.11 to 2.13.
"""

ITEMS: tuple[Any, ...] = (_aten._local_scalar_dense.default,)
"""The operators that `Tensor.item` calls.

Why: aten has it under a private name only.
Holds: torch 2.11 to 2.13.
"""


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """Return the norm of every tensor, each (), with one kernel for all.

    Why: `torch.nn.utils.get_total_norm` uses it, but returns one norm for all, in their number
    format.
    Holds: torch 2.11 to 2.13.
    """
    return list(torch._foreach_norm(list(tensors), order))


def interpolate(starts: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """Move tensors in place towards others of the same format, with one kernel for all.

    Why: `torch.optim.swa_utils` uses it, but keeps copies of full modules.
    Holds: torch 2.11 to 2.13.

    Args:
        starts: what moves.
        ends: what it moves to.
        weight: part of the way.
    """
    if starts:
        torch._foreach_lerp_(list(starts), list(ends), weight)


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a () tensor, with one kernel for all.

    Why: `torch.nn.utils.clip_grads_with_norm_` uses it, but takes no factor.
    Holds: torch 2.11 to 2.13.
    """
    torch._foreach_mul_(list(tensors), factor)
