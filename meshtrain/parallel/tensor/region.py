"""How the stream lies on the tp group, and how to cross into sharded weights and back."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshtrain.parallel.randomness import Streams
from meshtrain.parallel.tensor.collectives import copy_to_shards, gather_sequence, reduce_from_shards, scatter_sequence

Edge = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Region:
    """A part of the model in which the stream is replicated over tp, or lies in parts of the sequence.

    Attributes:
        group: the processes of tp.
        sequence_parallel: whether the stream lies in parts in a pass with gradients.
        streams: random streams of this process; None if nothing is random in training.
    """

    group: ProcessGroup
    sequence_parallel: bool
    streams: Streams | None

    def in_parts(self) -> bool:
        """Tell whether the stream of this pass lies in parts."""
        return self.sequence_parallel and stream_in_parts()

    def enter(self, x: Tensor) -> Tensor:
        """Make the stream whole for a column-wise projection."""
        if not self.in_parts():
            return copy_to_shards(x, self.group)
        assert x.dim() == 3, f"a part of the sequence is {tuple(x.shape)} and not (batch, seq/tp, hidden)"
        return gather_sequence(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum the partial results of a row-wise projection back into the stream."""
        return scatter_sequence(x, self.group) if self.in_parts() else reduce_from_shards(x, self.group)


def stream_in_parts() -> bool:
    """Tell whether sequence parallelism splits the stream of this pass.

    It saves what is kept for a backward pass. Without one there is nothing to save, and the sequence may be one token
    that continues a text.
    """
    return torch.is_grad_enabled()


def nothing(x: Tensor) -> Tensor:
    """Give back what came: for an edge without a collective."""
    return x
