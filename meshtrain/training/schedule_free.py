"""Schedule-free AdamW: gradients are taken near an average of the weights, which is the result."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshtrain.training.per_parameter import PerParameter

STEPPED, SQUARES, WEIGHT_SUM = "z", "exp_avg_sq", "weight_sum"
TRAINED = "trained"
"""State that has the weights of training, while the average is in their place."""


class ScheduleFreeAdamW(PerParameter):
    """Needs no schedule: a learning rate that stays the same after its warm-up.

    AdamW without a mean of the gradients moves the weights z. Their average is x. It weighs a step
    by the square of its learning rate. The parameters hold y = beta1 x + (1 - beta1) z, where the
    gradients are taken. Only y and z are kept, and x follows from them. Each number is updated
    alone.

    Args:
        groups: parameter groups.
        options: `lr`, which never falls, `betas` with the first above 0, `eps` and `weight_decay`.

    Source: The road less scheduled (Defazio et al., arXiv:2405.15682), and the package
        `schedulefree`.
    """

    scalar_states: ClassVar[tuple[str, ...]] = (WEIGHT_SUM,)

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        # Steps are counted on the device, so that nothing waits for it.
        super().__init__(groups, options | {"fused": True})

    def update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """Update a parameter and its state; the arguments are those of `PerParameter`."""
        state, rate, (first, second) = self.state[parameter], group["lr"], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state[WEIGHT_SUM] = torch.zeros((), dtype=torch.float64, device=parameter.device)
            state |= {STEPPED: parameter.detach().clone(), SQUARES: torch.zeros_like(parameter)}
        state["step"] += 1
        state[WEIGHT_SUM] += rate**2
        # A warm-up begins with a rate of 0. Such a step changes nothing.
        share = rate**2 / state[WEIGHT_SUM].clamp(min=torch.finfo(torch.float64).tiny)
        correction = 1 - second ** state["step"].double()
        squares = state[SQUARES].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        direction = gradient / (squares / correction.to(squares.dtype)).sqrt_().add_(group["eps"])
        direction.add_(parameter, alpha=group["weight_decay"])
        parameter.lerp_(state[STEPPED], share.to(parameter.dtype))
        parameter.addcmul_(direction, (rate * (first * (1 - share) - 1)).to(parameter.dtype))
        state[STEPPED].sub_(direction, alpha=rate)

    @contextmanager
    def average_in_place(self) -> Iterator[None]:
        """Have the average in the parameters inside the block. The weights of training come back.

        They are a state meanwhile, so that a checkpoint that is written in the block has them.
        """
        with torch.no_grad():
            for parameter, group in self._updated():
                state = self.state[parameter]
                state[TRAINED] = parameter.detach().clone()
                parameter.lerp_(state[STEPPED], 1 - 1 / group["betas"][0])
            try:
                yield
            finally:
                self.take_up()

    @torch.no_grad()
    def take_up(self) -> None:
        """Put the weights of training into the parameters, where their average is."""
        for parameter, _ in self._updated():
            parameter.copy_(self.state[parameter].pop(TRAINED))

    def _updated(self) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        """Yield the parameters that ever had a gradient, and their groups."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state.get(parameter):
                    yield parameter, group


def weights_of_result(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Have the weights that are evaluated and saved in the parameters inside the block."""
    return optimizer.average_in_place() if isinstance(optimizer, ScheduleFreeAdamW) else nullcontext()
