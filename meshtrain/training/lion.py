"""Lion: an optimizer that keeps one moment, and takes steps of one size."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MOMENT = "exp_avg"


class Lion(Optimizer):
    """Moves each number by the learning rate, against the sign of its moment.

    Each number is updated alone, so shards compute what one process does. Weight decay is decoupled
    from the gradient, as in AdamW.

    Args:
        groups: parameter groups.
        options: `lr`, `betas` and `weight_decay`. The first of `betas` weighs moment and gradient
            in a step, the second one is the decay rate of the moment.

    Source: Symbolic discovery of optimization algorithms (Chen et al., arXiv:2302.06675).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (now, kept), rate = self.state[parameter], group["betas"], group["lr"]
        if not state:
            state[MOMENT] = torch.zeros_like(parameter)
        direction = state[MOMENT].lerp(gradient, 1 - now).sign_()
        parameter.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
        state[MOMENT].lerp_(gradient, 1 - kept)
