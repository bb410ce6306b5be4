"""The collectives of context parallelism, with their gradients, on plain tensors.

Each is one function from tensor to tensor; see `meshtrain.parallel.transposable`.
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from meshtrain.compat.operators import collectives as operators
from meshtrain.parallel.transposable import gather_along, pair_of, scatter_along

_HEADS, _SEQUENCE = 1, 2


def _exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send `x[i]` to rank i, and return what came, in the order of the ranks."""
    sizes = [1] * group.size()
    return operators.wait_tensor(operators.all_to_all_single(x.contiguous(), sizes, sizes, group.group_name))


def _to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    by_rank = x.unflatten(_HEADS, (group.size(), -1)).movedim(_HEADS, 0)
    return _exchange(by_rank, group).movedim(0, _SEQUENCE).flatten(_SEQUENCE, _SEQUENCE + 1)


def _to_parts(x: Tensor, group: ProcessGroup) -> Tensor:
    by_rank = x.unflatten(_SEQUENCE, (group.size(), -1)).movedim(_SEQUENCE, 0)
    return _exchange(by_rank, group).movedim(0, _HEADS).flatten(_HEADS, _HEADS + 1)


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    return gather_along(x, _SEQUENCE, group)


def _scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    return scatter_along(x, _SEQUENCE, group)


to_heads, to_parts = pair_of(_to_heads, _to_parts)
"""Collectives around attention on some heads of the full sequence.

`to_heads` turns (batch, heads, seq/cp, width) into (batch, heads/cp, seq, width), and `to_parts`
turns that back.
"""

gather_keys, scatter_keys = pair_of(_gather, _scatter)
"""Collectives around attention on a part of the sequence.

`gather_keys` joins keys or values (batch, heads, seq/cp, width) to (batch, heads, seq, width).
`scatter_keys` turns partial sums of that shape into this process's part of their sum.
"""
