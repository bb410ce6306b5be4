"""What goes through the layers of a model instead of a mask of all pairs of a row."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from meshtrain.compat.transformers import mask_function_of
from meshtrain.parallel.documents.segments import Segment, in_chunks, in_windows

Rule = Literal["causal", "window", "chunks", "other"]


class SegmentedMask:
    """The segments of a microbatch for one kind of layer, and the masks inside of them.

    It belongs to its microbatch, because a recomputation may come after the next forward pass.

    Args:
        base: name of the attention of the model.
        segments: of whole documents, as far as their queries are computed here.
        mask_function: maps the indices of batch, head, query and key inside of a document to
            whether the query sees the key.
        local_size: how many keys before its own position a query may see, itself included; None:
            all of its document.
        kwargs: further arguments of the function for masks.

    Attributes:
        rule: which keys of its document a query sees.
        local_size: size of the windows or chunks.
        segments: no longer than a chunk.
    """

    def __init__(
        self,
        base: str,
        segments: Sequence[Segment],
        *,
        mask_function: Callable[..., Any],
        local_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.base, self._function = base, mask_function
        self._kwargs = {name: kwargs[name] for name in ("dtype", "config", "use_vmap", "device") if name in kwargs}
        self.local_size = local_size or 0
        self.rule = _rule_of(mask_function, local_size, self._kwargs.get("device", "cpu"))
        self.segments = in_chunks(segments, self.local_size) if self.rule == "chunks" else list(segments)
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    @cached_property
    def blocks(self) -> list[Segment]:
        """The segments, of which each has the keys of about one window."""
        return in_windows(self.segments, self.local_size) if self.rule == "window" else self.segments

    def within(self, it: Segment, dtype: torch.dtype) -> Tensor | None:
        """Return the mask of a block, as the attention of the model takes it.

        Args:
            it: one of `blocks`.
            dtype: of the queries.

        Returns:
            (1, 1, queries, keys); None for plain causal attention where that needs no mask.
        """
        is_plain = self.rule in ("causal", "chunks") or (self.rule == "window" and it.num_keys <= self.local_size)
        if is_plain and it.num_queries == it.num_keys and self.base == "sdpa":
            return None
        # All rules but an unknown one are the same at every position.
        place = (it.row, it.position) if self.rule == "other" else ()
        key = (it.num_queries, it.num_keys, dtype, *place)
        if key not in self._masks:
            mask = self._make(it)
            if mask.dtype == torch.bool:
                # As attention adds it. Each layer would keep a copy of its own otherwise.
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
            self._masks[key] = mask
        return self._masks[key]

    def _make(self, it: Segment) -> Tensor:
        def inside(b: Any, h: Any, q: Any, k: Any) -> Any:
            return self._function(b + it.row, h, q + it.first, k + it.position)

        return mask_function_of(self.base)(
            batch_size=1,
            q_length=it.num_queries,
            kv_length=it.num_keys,
            mask_function=inside,
            allow_is_causal_skip=False,
            **self._kwargs,
        )


def _rule_of(function: Callable[..., Any], size: int | None, device: Any) -> Rule:
    """Return the rule of a mask function; `other` for one that is none of the known ones."""
    if function is causal_mask_function:
        return "causal"
    if size is None:
        return "other"
    q = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size], device=device)[:, None]
    k = torch.arange(2 * size + 1, device=device)
    zero = torch.zeros(1, 1, dtype=torch.long, device=device)
    seen = function(zero, zero, q, k)
    # In a simulation, which has no values, it is the first rule of these.
    if not (seen != (k <= q) & (k > q - size)).any().item():
        return "window"
    if not (seen != (k <= q) & (k // size == q // size)).any().item():
        return "chunks"
    return "other"
