"""Whole copies of the model that see different samples: their gradients are summed while the backward pass runs."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshtrain.models.layout import local_tensor

# Elements from which a message is worth sending alone.
LARGE = 2**18


class Replicas:
    """Sums gradients over the dp_replicate axis, where FSDP2 does not do it.

    A large gradient is on its way as soon as the last microbatch has added to it; all small ones follow in one message.
    A schedule that computes the gradients of the weights apart adds them past autograd's hooks, so there the large ones
    are not seen to be complete: they go with the small ones, at the end.

    Args:
        parameters: of this process.
        group: the processes that hold the same part of the model; None if there are no copies.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: ProcessGroup | None) -> None:
        self._parameters = tuple(parameters)
        self._group = group
        self._num_microbatches = 0
        self._additions: dict[nn.Parameter, int] = {}
        self._works: dict[nn.Parameter, dist.Work] = {}
        if group is not None:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._count)

    def begin_step(self, num_microbatches: int) -> None:
        """Say after how many backward passes a gradient is complete."""
        self._num_microbatches = num_microbatches
        self._additions.clear()

    def reduce_gradients(self) -> None:
        """Sum what is not yet on its way, and wait for all."""
        if self._group is None:
            return
        for parameter in self._parameters:
            if _is_large(parameter) and parameter not in self._works:
                self._send(parameter)
        all_reduce_small([local_gradient(p) for p in self._parameters if not _is_large(p)], self._group)
        for work in self._works.values():
            work.wait()
        self._works.clear()

    def _count(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._additions[parameter] = self._additions.get(parameter, 0) + 1
        if self._additions[parameter] == self._num_microbatches and _is_large(parameter):
            self._send(parameter)

    def _send(self, parameter: nn.Parameter) -> None:
        work = dist.all_reduce(local_gradient(parameter), group=self._group, async_op=True)
        assert work is not None
        self._works[parameter] = work


def all_reduce_small(gradients: list[Tensor], group: ProcessGroup) -> None:
    """Sum many small tensors over a group, in place and in one message."""
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view(gradient.shape))


def _is_large(parameter: nn.Parameter) -> bool:
    return local_tensor(parameter.detach()).numel() >= LARGE


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the part of a parameter's gradient that lies on this process."""
    assert parameter.grad is not None, "a parameter has no gradient"
    return local_tensor(parameter.grad)
