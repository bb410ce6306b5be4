"""Operators of torch under private names: over lists of tensors, of functional collectives, and of aten."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

collectives: Any = torch.ops._c10d_functional
"""The operators under torch's functional collectives.

Why: the Python functions around them are private as well, are renamed from release to release, and give asynchronous
tensors, of which a compiled block loses the gradients.
Holds: torch 2.11 to 2.13.
"""

_aten: Any = torch.ops.aten
VIEWS: tuple[Any, ...] = (_aten.view, _aten._unsafe_view)
"""What `Tensor.view` and `Tensor.reshape` come to.

Why: aten calls the view of what a matrix product gave by a private name.
Holds: torch 2.11 to 2.13.
"""

CASTS: tuple[Any, ...] = (_aten._to_copy,)
"""What `Tensor.to` comes to.

Why: aten has it under a private name only.
Holds: torch 2.11 to 2.13.
"""

EXPENSIVE: tuple[Any, ...] = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    collectives.all_reduce.default,
    collectives.all_gather_into_tensor.default,
    collectives.reduce_scatter_tensor.default,
)
"""Matrix products, attention (on every device that torch has a kernel for) and collectives.

Why: selective recomputation keeps their results. It is told by operator, and most have private names.
Holds: torch 2.11 to 2.13.
"""

ITEMS: tuple[Any, ...] = (_aten._local_scalar_dense.default,)
"""What `Tensor.item` comes to.

Why: aten has it under a private name only.
Holds: torch 2.11 to 2.13.
"""


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """Return the norm of every tensor, each (), with one kernel for all.

    Why: `torch.nn.utils.get_total_norm` uses it, and gives one norm of all, in their number format.
    Holds: torch 2.11 to 2.13.
    """
    return list(torch._foreach_norm(list(tensors), order))


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a () tensor, with one kernel for all.

    Why: `torch.nn.utils.clip_grads_with_norm_` uses it, and takes no factor.
    Holds: torch 2.11 to 2.13.
    """
    torch._foreach_mul_(list(tensors), factor)
