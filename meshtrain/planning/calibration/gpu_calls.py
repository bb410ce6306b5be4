"""Calls of a simulation as a GPU makes them.

Simulations run on fake tensors of the CPU, so some of their calls name operators that a GPU does
not have, or have arguments in other number formats.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshtrain.compat.operators_seen import attention_of_cpu, operator_of


def call_on_gpu(operator: str, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], object]:
    """Return a function that makes a call on a GPU.

    Args:
        operator: its full name.
        args: with tensors on the GPU, in the number formats of the CPU.
        kwargs: likewise.
    """
    if attention_of_cpu(operator) is not None:
        return attention_on_gpu(operator, args, kwargs)
    if operator == "aten.native_layer_norm_backward.default":
        # A CPU keeps the statistics in the format of the input.
        args = [*args[:3], *(tensor.float() for tensor in args[3:5]), *args[5:]]
    return partial(operator_of(operator), *args, **kwargs)


def attention_on_gpu(operator: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], object]:
    """Return a function that computes on a GPU what such an operator does on a CPU.

    Args:
        operator: its full name. That of the backward pass takes the gradient of the output first.
        args: with tensors on the GPU, as the operator takes them.
        kwargs: likewise.
    """
    is_backward = attention_of_cpu(operator) == "backward"
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
