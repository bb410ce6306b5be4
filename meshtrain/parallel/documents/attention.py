"""Attention of separate documents: a call for each segment, or one kernel for all of them."""

from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.compat.varlen import attend_to_lengths
from meshtrain.parallel.documents.mask import SegmentedMask
from meshtrain.parallel.documents.ranges import take_ranges

WIDEST_HEAD, OLDEST_GPU = 256, 8
"""Limits of torch's kernel: the width of a head, and the compute capability of the GPU."""


def attend_by_segments(
    inner: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: SegmentedMask, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention for the segments of a microbatch.

    Args:
        inner: the attention of the model.
        module: of attention.
        query: (batch, heads, queries, width)
        key: (batch, key heads, seq, width)
        value: (batch, key heads, seq, width)
        mask: of the microbatch.
        kwargs: further arguments of the attention.

    Returns:
        (batch, queries, heads, width), and no weights.
    """
    if fits_one_kernel(module, query, key, value, mask, **kwargs):
        return attend_at_once(query, key, value, mask, kwargs.get("scaling")), None
    queries = take_ranges(query, [(it.row, it.query, it.num_queries) for it in mask.blocks])
    places = [(it.row, it.key, it.num_keys) for it in mask.blocks]
    outputs = [
        inner(module, q, k, v, mask.within(it, query.dtype), **kwargs)[0]
        for it, q, k, v in zip(mask.blocks, queries, take_ranges(key, places), take_ranges(value, places), strict=True)
    ]
    return torch.cat(outputs, 1).squeeze(0).unflatten(0, (query.shape[0], -1)), None


def fits_one_kernel(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SegmentedMask,
    *,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> bool:
    """Return whether the kernel for documents of any lengths computes what the model's would.

    The arguments are those that "sdpa" of transformers uses, and it ignores others.
    """
    fits_gpu = (
        query.device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(query.device)[0] >= OLDEST_GPU
        and query.dtype in (torch.bfloat16, torch.float16)
    )
    width = query.shape[-1]
    fits_heads = width == key.shape[-1] == value.shape[-1] <= WIDEST_HEAD and width % 8 == 0
    is_plain = dropout == 0.0 and position_bias is None and is_causal is not False
    is_plain = is_plain and getattr(module, "is_causal", True) and mask.base == "sdpa" and mask.rule != "other"
    return fits_gpu and fits_heads and is_plain


def attend_at_once(query: Tensor, key: Tensor, value: Tensor, mask: SegmentedMask, scaling: float | None) -> Tensor:
    """Compute attention for all segments by one kernel, which torch has for 16 bits on a GPU.

    Arguments and result are those of `attend_by_segments`.
    """
    segments, seq = mask.segments, key.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if [it.num_keys for it in segments] != [it.num_queries for it in segments] or len(q) != len(k):
        starts = [it.row * seq + it.key for it in segments]
        columns = [torch.arange(start, start + it.num_keys) for start, it in zip(starts, segments, strict=True)]
        index = torch.cat(columns).to(key.device)
        k, v = k.index_select(0, index), v.index_select(0, index)
    queries, keys = [it.num_queries for it in segments], [it.num_keys for it in segments]
    output = attend_to_lengths(
        q,
        k,
        v,
        (_borders(queries, query.device), _borders(keys, query.device)),
        (max(queries), max(keys)),
        scale=scaling,
        # The kernel does not count a query's own key.
        window_size=(mask.local_size - 1 if mask.rule == "window" else -1, 0),
    )
    return output.unflatten(0, (query.shape[0], -1))


def _borders(lengths: list[int], device: torch.device) -> Tensor:
    """Return the (segments + 1,) int32 borders of segments that follow each other."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
