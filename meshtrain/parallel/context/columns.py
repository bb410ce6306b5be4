"""Which tokens of a sequence each rank of cp has."""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshtrain.config.plan import ContextOrder


@dataclass(frozen=True)
class Columns:
    """How the tokens of a sequence are distributed over cp.

    Attributes:
        order: `contiguous`: one piece for each rank. `head_tail`: two pieces, of which one is as
            far from the start as the other is from the end, so that all ranks have as many pairs of
            a token and an earlier one.
        size: number of ranks, which divides every length.
    """

    order: ContextOrder
    size: int

    @property
    def unit(self) -> int:
        """The number that divides the length of every sequence, in tokens."""
        return self.size * (2 if self.order == "head_tail" else 1)

    def pieces(self, rank: int, length: int) -> list[tuple[int, int]]:
        """Return the first column of each piece that a rank has, and the one behind its last."""
        size = length // self.unit
        numbers = (rank, self.unit - 1 - rank) if self.order == "head_tail" else (rank,)
        return [(number * size, (number + 1) * size) for number in numbers]

    def of(self, rank: int, length: int) -> Tensor:
        """Return the (seq/cp,) columns that a rank has of a sequence of `length` tokens."""
        return torch.cat([torch.arange(*piece) for piece in self.pieces(rank, length)])

    def joined(self, length: int, *, last: int = -1) -> Tensor:
        """Return the (seq,) columns of all ranks, one rank after another.

        Args:
            length: of the sequence, in tokens.
            last: the rank whose columns come last.
        """
        return torch.cat([self.of((last + 1 + rank) % self.size, length) for rank in range(self.size)])
