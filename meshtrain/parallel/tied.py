"""Tied embeddings on two stages: a copy on the first and one on the last.

Equal gradients keep the two copies equal.
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshtrain.parallel.replicas import local_gradient


class TiedCopies:
    """The tied weights of a model, whose gradients are summed over the first stage and the last.

    Both copies start equal, have the same sharding and get equal gradients, so their optimizers
    keep them equal. There are two copies even if one process holds both stages (the V schedules).
    The reason is that FSDP2 manages each stage separately. A parameter that two of its roots share
    would lose gradients without an error.

    Args:
        originals: the parameters on the first stage, if this process holds that stage.
        copies: the parameters on the last stage, in the same order, if this process holds it.
        group: the process of the first stage and that of the last; None if one process holds both
            stages, and on the processes between them.
    """

    def __init__(
        self, originals: Sequence[nn.Parameter], copies: Sequence[nn.Parameter], group: ProcessGroup | None
    ) -> None:
        self.originals, self.copies, self.group = tuple(originals), tuple(copies), group

    def trained_originals(self) -> int:
        """Return a bit for each tie, which is set if the tie is not frozen.

        The result is 0 on a process that does not hold the first stage.
        """
        return sum(original.requires_grad << number for number, original in enumerate(self.originals))

    def freeze_copies(self, trained: int) -> None:
        """Freeze each copy if its original is frozen, and unfreeze it otherwise.

        The originals decide, because a program knows the parameters by their names.

        Args:
            trained: the result of `trained_originals` on the process that holds the first stage.
        """
        for number, copy in enumerate(self.copies):
            copy.requires_grad_(bool(trained >> number & 1))

    def reduce_gradients(self) -> None:
        """Sum the gradients of both ends. Call it once per step, before the norm is computed."""
        self.add_up(local_gradient)

    def add_up(self, value_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Sum the values of both ends of every tie that is not frozen.

        Args:
            value_of: returns the tensor of a parameter, which is changed in place to the sum.
        """
        if self.originals and self.copies:
            pairs = zip(self.originals, self.copies, strict=True)
            for original, copy in (pair for pair in pairs if pair[0].requires_grad):
                total, other = value_of(original), value_of(copy)
                other.copy_(total.add_(other))
            return
        for parameter in (one for one in (*self.originals, *self.copies) if one.requires_grad):
            dist.all_reduce(value_of(parameter), group=self.group)
