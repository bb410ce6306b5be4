"""How hidden states are distributed over tp, and the collectives around sharded weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshtrain.parallel.randomness import Streams
from meshtrain.parallel.tensor.collectives import (
    copy_and_post,
    copy_to_shards,
    gather_and_post,
    gather_sequence,
    reduce_result,
    scatter_sequence,
)

Edge = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Region:
    """A part of the model where hidden states are replicated over tp or split along the sequence.

    Attributes:
        group: the processes of tp.
        sequence_parallel: whether hidden states are split in a pass with gradients.
        streams: random streams of this process; None if nothing is random in training.
        posts_sums: whether gradients of weights may be computed while the gradients of their inputs
            travel; see `late_gradients`.
    """

    group: ProcessGroup
    sequence_parallel: bool
    streams: Streams | None
    posts_sums: bool = False

    def is_split(self) -> bool:
        """Return whether hidden states are split along the sequence in this pass."""
        return self.sequence_parallel and sequence_is_split()

    def enter(self, x: Tensor, *, posts: bool = False) -> Tensor:
        """Return the full hidden states for a column-wise projection.

        Args:
            x: (batch, seq, hidden), or a part of the sequence.
            posts: whether the sum of the gradients is only posted, and `x` comes from
                `await_posted`.
        """
        if not self.is_split():
            return (copy_and_post if posts else copy_to_shards)(x, self.group)
        assert x.dim() == 3, f"a part of the sequence is {tuple(x.shape)} and not (batch, seq/tp, hidden)"
        return (gather_and_post if posts else gather_sequence)(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum the partial results of a row-wise projection to the hidden states of this region.

        The caller has just computed them, and nobody else has seen them.
        """
        return scatter_sequence(x, self.group) if self.is_split() else reduce_result(x, self.group)


def sequence_is_split() -> bool:
    """Return whether sequence parallelism splits the hidden states of this pass.

    The split saves memory that is kept for a backward pass. Without a backward pass there is
    nothing to save, and the sequence may be one token that continues a text.
    """
    return torch.is_grad_enabled()


def identity(x: Tensor) -> Tensor:
    """Return `x`, as an edge without a collective."""
    return x
