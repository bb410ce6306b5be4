"""Sum the gradients of full copies of the model on different samples, during the backward pass."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshtrain.models.layout import local_tensor

# Number of elements from which a gradient is sent in a message of its own.
LARGE = 2**18


class Replicas:
    """The sums of gradients over the dp_replicate axis, where FSDP2 does not compute them.

    A large gradient is sent as soon as the last microbatch has added to it. All small gradients
    follow in one message. Some schedules compute the gradients of the weights separately and add
    them without autograd's hooks. There nothing shows that a large gradient is complete, so the
    large ones are sent at the end, when the small ones are.

    All processes send in the same order, which is the reverse of the model's. Otherwise a process
    that lacks a gradient (of an expert that got no token) would add its next gradient to that of
    another parameter.

    Args:
        parameters: of this process. Those that are frozen at the time are left out.
        group: the processes that hold the same part of the model; None if there are no copies.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: ProcessGroup | None) -> None:
        self._parameters = tuple(parameters)
        self._group = group
        self._num_microbatches = 0
        self._small: list[nn.Parameter] = []
        self._large: list[nn.Parameter] = []
        self._watched: set[nn.Parameter] = set()
        self._additions: dict[nn.Parameter, int] = {}
        self._works: list[dist.Work] = []
        self._find_trained()

    @property
    def is_needed(self) -> bool:
        """Return whether there are copies whose gradients nothing else sums."""
        return self._group is not None

    def begin_step(self, num_microbatches: int) -> None:
        """Set the number of backward passes after which a gradient is complete."""
        self._num_microbatches = num_microbatches
        self._additions.clear()
        # Repeated for every step, because parameters may be frozen and unfrozen between steps.
        self._find_trained()

    def reduce_gradients(self) -> None:
        """Sum the gradients that are not yet sent, and wait for all sums.

        Every parameter must have a gradient.
        """
        if self._group is None:
            return
        while len(self._works) < len(self._large):
            self._send_next()
        all_reduce_small([local_gradient(parameter) for parameter in self._small], self._group)
        for work in self._works:
            work.wait()
        self._works.clear()

    def abandon_step(self) -> None:
        """Wait for the messages of a backward pass that has failed, and forget them."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def _find_trained(self) -> None:
        if self._group is None:
            return
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._small = [parameter for parameter in trained if not _is_large(parameter)]
        self._large = [parameter for parameter in reversed(trained) if _is_large(parameter)]
        for parameter in self._large:
            if parameter not in self._watched:
                parameter.register_post_accumulate_grad_hook(self._count)
                self._watched.add(parameter)

    def _count(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._additions[parameter] = self._additions.get(parameter, 0) + 1
        while self._next_is_complete():
            self._send_next()

    def _next_is_complete(self) -> bool:
        following = self._large[len(self._works) : len(self._works) + 1]
        return any(self._additions.get(parameter, 0) == self._num_microbatches for parameter in following)

    def _send_next(self) -> None:
        gradient = local_gradient(self._large[len(self._works)])
        work = dist.all_reduce(gradient, group=self._group, async_op=True)
        assert work is not None
        self._works.append(work)


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
    """Return the part of a parameter's gradient that this process holds."""
    assert parameter.grad is not None, "a parameter has no gradient"
    return local_tensor(parameter.grad)
