"""Attention of a simulation as a GPU runs it.

Simulations run on fake tensors of the CPU, so their calls name operators that a GPU does not have.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.compat.fake import ATTENTION

_FOR_CPU = "_for_cpu"


def is_for_cpu(operator: str) -> bool:
    """Return whether an operator is attention that exists on a CPU only, by its full name."""
    return ATTENTION in operator and _FOR_CPU in operator


def attention_on_gpu(operator: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], object]:
    """Return a function that computes on a GPU what such an operator does on a CPU.

    Args:
        operator: its full name. That of the backward pass takes the gradient of the output first.
        args: with tensors on the GPU, as the operator takes them.
        kwargs: likewise.
    """
    is_backward = "_backward" in operator
    query, key, value = args[1:4] if is_backward else args[:3]
    place = 7 if is_backward else 4
    is_causal = args[place] if len(args) > place else kwargs.get("is_causal", False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=kwargs.get("attn_mask"),
            is_causal=is_causal,
            scale=kwargs.get("scale"),
            enable_gqa=query.shape[1] != key.shape[1],
        )

    if not is_backward:
        return lambda: attend(query, key, value)
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        output = attend(*inputs)
    return lambda: torch.autograd.grad(output, inputs, args[0].to(output.dtype), retain_graph=True)
