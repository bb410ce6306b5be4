"""Tied embeddings across stages: a copy on the first stage and one on the last, kept equal by equal gradients."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshtrain.parallel.replicas import local_gradient


class TiedCopies:
    """Sums the gradients of a tied weight over its first stage and its last.

    Both copies start equal, are sharded alike and get equal gradients, so their optimizers keep them equal. There are
    two copies even where one process holds both stages (the V schedules): FSDP2 manages each stage by itself, and one
    parameter between two of its roots loses gradients without a word.

    Args:
        originals: what the first stage holds, if this process holds that.
        copies: what the last stage holds, if this process holds that, in the same order.
        group: the process of the first stage and that of the last; None where they are one, and on those between.
    """

    def __init__(
        self, originals: Sequence[nn.Parameter], copies: Sequence[nn.Parameter], group: ProcessGroup | None
    ) -> None:
        self.originals, self.copies, self.group = tuple(originals), tuple(copies), group

    def trained_originals(self) -> int:
        """Return which ties are not frozen, a bit for each; 0 on a process that does not hold the first stage."""
        return sum(original.requires_grad << number for number, original in enumerate(self.originals))

    def freeze_copies(self, trained: int) -> None:
        """Freeze and thaw the copies as their originals are, whose names are those that a program knows.

        Args:
            trained: what `trained_originals` has returned where the first stage lies.
        """
        for number, copy in enumerate(self.copies):
            copy.requires_grad_(bool(trained >> number & 1))

    def reduce_gradients(self) -> None:
        """Add both ends' gradients; call once per step, before the norm is taken."""
        self.add_up(local_gradient)

    def add_up(self, value_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Give both ends of every tie that is not frozen the sum of what `value_of` returns for them, in place."""
        if self.originals and self.copies:
            pairs = zip(self.originals, self.copies, strict=True)
            for original, copy in (pair for pair in pairs if pair[0].requires_grad):
                total, other = value_of(original), value_of(copy)
                other.copy_(total.add_(other))
            return
        for parameter in (one for one in (*self.originals, *self.copies) if one.requires_grad):
            dist.all_reduce(value_of(parameter), group=self.group)
