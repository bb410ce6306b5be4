"""Find out which projections of attention give and take heads, and of which kind."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from meshtrain.parallel.tensor.dataflow.blocks import Cut, joined_hits
from meshtrain.parallel.tensor.dataflow.reach import Reach
from meshtrain.parallel.tensor.head_share import Heads

HeadLabel = Literal["queries", "keys", "all", "taken"]
"""What a part of a projection's outputs is: query heads, key-value heads, or something that all
heads use. `taken`: its inputs are query heads."""


def labels_of(cut: Cut, reached: Mapping[str, Reach], heads: Heads) -> dict[str, tuple[HeadLabel, ...]]:
    """Return projection -> labels of its parts, in order.

    Args:
        cut: of a model.
        reached: projection -> what reaches its inputs.
        heads: of the model.

    Returns:
        Nothing if the cut is not by heads.
    """
    widths = [reached[name].inputs for name in cut.rows]
    if cut.blocks not in (heads.queries, heads.keys) or any(width % heads.queries for width in widths):
        return {}
    # (inputs of all rows) int: the query head of each input.
    head = torch.cat([torch.arange(width) * heads.queries // width for width in widths])
    labels: dict[str, tuple[HeadLabel, ...]] = dict.fromkeys(cut.rows, ("taken",))
    for name, parts in cut.columns.items():
        hits = joined_hits(name, cut.rows, reached).split([part.width for part in parts])
        of_parts = [
            _label(hit, head, heads) if part.kind == "cut" or (part.kind == "shared" and heads.keys == 1) else "all"
            for hit, part in zip(hits, parts, strict=True)
        ]
        known = tuple(label for label in of_parts if label is not None)
        if len(known) < len(of_parts):
            return {}
        labels[name] = known
    return labels


def _label(hit: Tensor, head: Tensor, heads: Heads) -> HeadLabel | None:
    """Return what features are, from the inputs that they reach.

    Args:
        hit: (features, inputs) bool.
        head: (inputs) int, the query head of each input.
        heads: of the model.
    """
    touched = [sorted({*head[row].tolist()}) for row in hit]
    if _falls_into(touched, heads.queries, 1):
        return "queries"
    if heads.keys > 1 and _falls_into(touched, heads.keys, heads.queries // heads.keys):
        return "keys"
    if heads.keys == 1 and _falls_into(touched, 1, heads.queries):
        return "keys"
    return None


def _falls_into(touched: Sequence[Sequence[int]], count: int, size: int) -> bool:
    """Return whether each feature reaches one of `count` groups of `size` query heads, in order."""
    if len(touched) % count:
        return False
    groups = [index * count // len(touched) for index in range(len(touched))]
    return all(each == [*range(at * size, (at + 1) * size)] for each, at in zip(touched, groups, strict=True))
