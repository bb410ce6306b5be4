"""The collectives of tensor parallelism, with their gradients, on plain tensors.

Each is one function from tensor to tensor; see `meshtrain.parallel.transposable`.

Source: Megatron-LM (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2.2 for the sequence
dimension).
"""

import functools

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshtrain.compat.operators import collectives as operators
from meshtrain.parallel.transposable import (
    Collective,
    gather_along,
    pair_of,
    post_gradient,
    post_scatter,
    scatter_along,
    sum_gradient,
    sum_over,
    sum_result,
)

SEQUENCE_DIM = 1


def _identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    return gather_along(x, SEQUENCE_DIM, group)


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    return scatter_along(x, SEQUENCE_DIM, group)


def _post_reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    return post_scatter(x, SEQUENCE_DIM, group)


def _split(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), SEQUENCE_DIM)[group.rank()].contiguous()


_COPY_AND_SUM = (_identity, sum_over)
copy_to_shards, _ = pair_of(_identity, sum_gradient, in_graphs=_COPY_AND_SUM)
"""Pass replicated hidden states (batch, seq, hidden) to a computation with a shard of the weights.

The gradient is summed over the shards.
"""

copy_and_post, _ = pair_of(_identity, post_gradient, in_graphs=_COPY_AND_SUM)
"""Do the same with what `await_posted` has returned, which waits for the sum of the gradient."""

_, reduce_from_shards = pair_of(_identity, sum_over)
"""Turn partial sums (batch, seq, hidden) into their replicated sum."""

_, reduce_result = pair_of(_identity, sum_result, in_graphs=_COPY_AND_SUM)
"""Do the same in the memory of the partial sums.

The caller has just computed them, and nobody else has seen them.
"""

gather_sequence, scatter_sequence = pair_of(_all_gather, _reduce_scatter)
"""Collectives for hidden states that are split along the sequence.

`gather_sequence` joins (batch, seq/tp, hidden) to (batch, seq, hidden) for a computation with a
shard of the weights. `scatter_sequence` turns partial sums (batch, seq, hidden) into this process's
part of their sum, (batch, seq/tp, hidden).
"""

gather_and_post, _ = pair_of(_all_gather, _post_reduce_scatter, in_graphs=(_all_gather, _reduce_scatter))
"""Do as `gather_sequence` with what `await_posted` has returned, which waits for the gradient."""

split_sequence, join_sequence = pair_of(_split, _all_gather)
"""Collectives around a region that is split along the sequence.

`split_sequence` takes this process's part, (batch, seq/tp, hidden), of replicated (batch, seq,
hidden). `join_sequence` joins (batch, seq/tp, hidden) to (batch, seq, hidden) for a computation
that is the same on every process.
"""


def _split_last(x: Tensor, group: ProcessGroup) -> Tensor:
    width = shard_width(x.shape[-1], group)
    start = group.rank() * width
    return x[..., start : start + width].contiguous()


def _gather_last(size: int) -> Collective:
    def gather(x: Tensor, group: ProcessGroup) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, shard_width(size, group) - x.shape[-1]))
        gathered = gather_along(padded, x.dim() - 1, group)
        # The copy avoids a view: FSDP2 warns of views, whose in-place changes would lose gradients.
        return gathered if gathered.shape[-1] == size else gathered[..., :size].contiguous()

    return gather


@functools.cache
def _last_dimension(size: int) -> tuple[Collective, Collective]:
    """Return the functions that split and that gather a last dimension of this length."""
    return pair_of(_split_last, _gather_last(size))


def gather_vocabulary(logits: Tensor, vocabulary: int, group: ProcessGroup) -> Tensor:
    """Join logits (batch, seq, vocab/tp) to (batch, seq, vocab).

    Every process then computes the same loss. The shards may be uneven: the last ones are smaller,
    as torch.chunk makes them.
    """
    return _last_dimension(vocabulary)[1](logits, group)


def split_features(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this process's part (batch, seq, features/tp) of replicated (batch, seq, features)."""
    return _last_dimension(x.shape[-1])[0](x, group)


def shard_width(size: int, group: ProcessGroup) -> int:
    """Return the length of each shard of a dimension; the last shards may be shorter."""
    return -(-size // group.size())


def max_over_shards(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the element-wise maximum of `x` over the group, without a gradient."""
    return operators.wait_tensor(operators.all_reduce(x.contiguous(), "max", group.group_name))
