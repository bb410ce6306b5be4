"""Fused projections: one parameter in the stock model, several in ours.

A fused projection (GPT-2's `c_attn`) cannot be sharded as it stands: a contiguous shard of [q | k | v] mixes them, and
torch's `_StridedShard` is silently wrong for it under FSDP2. So its parts become children of their own, on every mesh,
tp = 1 included, and this file holds the two-way mapping to the stock names.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedParameter:
    """A stock parameter that we keep in equal parts.

    Attributes:
        name: the stock FQN, such as "transformer.h.0.attn.c_attn.weight".
        parts: our FQNs in order, such as "transformer.h.0.attn.c_attn.q.weight".
        dim: the tensor dimension along which the parts are joined.
    """

    name: str
    parts: tuple[str, ...]
    dim: int
