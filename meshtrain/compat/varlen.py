"""torch's attention of sequences of different lengths in one tensor."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

OPERATOR: Any = torch.ops.torch_attn._varlen_attn.default
"""The operator under `varlen_attn`.

Why: selective recomputation selects by operator, and this one has a private name.
Holds: torch 2.11 to 2.13.
"""

_MAY_SHARE_KEYS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def attend_to_lengths(
    query: Tensor, key: Tensor, value: Tensor, borders: tuple[Tensor, Tensor], longest: tuple[int, int], **options: Any
) -> Tensor:
    """Compute attention of sequences that follow each other.

    Why: heads of queries may share keys from torch 2.12 on. Before, each needs a copy.
    Holds: torch 2.11 to 2.13.

    Args:
        query: (queries, heads, width)
        key: (keys, key heads, width)
        value: (keys, key heads, width)
        borders: (sequences + 1,) int32, of queries and of keys.
        longest: the largest number of queries, and of keys.
        options: `scale` and `window_size` of torch.

    Returns:
        (queries, heads, width)
    """
    copies = query.shape[1] // key.shape[1]
    if _MAY_SHARE_KEYS:
        options["enable_gqa"] = copies > 1
    elif copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    output = varlen.varlen_attn(query, key, value, *borders, *longest, **options)
    assert isinstance(output, Tensor)
    return output
