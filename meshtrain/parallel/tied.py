"""Tied weights on several stages: one copy on each of them.

Equal gradients keep the copies equal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshtrain.parallel.replicas import local_gradient


@dataclass(frozen=True)
class Tie:
    """One tied weight with copies on several stages.

    Attributes:
        copies: those of this process, in the order of its stages; often none.
        original: the copy under the name that the weight has in checkpoints, if this process holds
            it.
        group: the processes that hold copies; None on the others, and if one process holds all.
    """

    copies: tuple[nn.Parameter, ...]
    original: nn.Parameter | None
    group: ProcessGroup | None


class TiedCopies:
    """The tied weights of a model, whose gradients are summed over the stages that hold copies.

    All copies start equal, have the same sharding and get equal gradients, so their optimizers keep
    them equal. There are several copies even if one process holds several of the stages (the V
    schedules). The reason is that FSDP2 manages each stage separately. A parameter that two of its
    roots share would lose gradients without an error.

    Args:
        ties: in the same order on every process.
    """

    def __init__(self, ties: Sequence[Tie] = ()) -> None:
        self.ties = tuple(ties)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every copy on this process."""
        for tie in self.ties:
            yield from tie.copies

    def trained_originals(self) -> list[int]:
        """Return a number for each tie: 1 if this process holds its original, and trains it."""
        return [int(tie.original is not None and tie.original.requires_grad) for tie in self.ties]

    def freeze_copies(self, trained: Sequence[int]) -> None:
        """Freeze each copy whose original is frozen, and unfreeze the others.

        The originals decide, because a program knows the parameters by their names.

        Args:
            trained: for each tie, the maximum of `trained_originals` over all processes.
        """
        for tie, is_trained in zip(self.ties, trained, strict=True):
            for parameter in tie.copies:
                if parameter is not tie.original:
                    parameter.requires_grad_(bool(is_trained))

    def reduce_gradients(self) -> None:
        """Sum the gradients of all copies. Call it once per step, before the norm is computed."""
        self.add_up(local_gradient)

    def add_up(self, value_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Sum the values of all copies of every tie that is not frozen.

        Args:
            value_of: returns the tensor of a parameter, which is changed in place to the sum.
        """
        for tie in self.ties:
            values = [value_of(parameter) for parameter in tie.copies if parameter.requires_grad]
            if not values:
                continue
            total, *others = values
            for value in others:
                total.add_(value)
            if tie.group is not None:
                dist.all_reduce(total, group=tie.group)
            for value in others:
                value.copy_(total)
