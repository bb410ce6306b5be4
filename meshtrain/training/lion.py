"""Lion: an optimizer that keeps one moment, and takes steps of one size."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshtrain.training.per_parameter import PerParameter

MOMENT = "exp_avg"


class Lion(PerParameter):
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

    def update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """Update a parameter and its state; the arguments are those of `PerParameter`."""
        state, (now, kept), rate = self.state[parameter], group["betas"], group["lr"]
        if not state:
            state[MOMENT] = torch.zeros_like(parameter)
        direction = state[MOMENT].lerp(gradient, 1 - now).sign_()
        parameter.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
        state[MOMENT].lerp_(gradient, 1 - kept)
