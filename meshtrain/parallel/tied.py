"""Tied embeddings across stages: a copy on the first stage and one on the last, kept equal by equal gradients."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from meshtrain.models.layout import local_tensor


class TiedCopies:
    """Sums the gradients of a tied weight over the process of its first stage and that of its last.

    Both copies start equal, are sharded alike and get equal gradients, so their optimizers keep them equal.

    Args:
        parameters: this process's copies, in the same order on both ends; empty on processes between.
        group: the two processes; None on processes between.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup | None) -> None:
        self.parameters, self.group = tuple(parameters), group

    def reduce_gradients(self) -> None:
        """Add both ends' gradients; call once per step, before the norm is taken."""
        for parameter in self.parameters:
            assert parameter.grad is not None, "a tied weight has no gradient"
            dist.all_reduce(local_tensor(parameter.grad), group=self.group)
