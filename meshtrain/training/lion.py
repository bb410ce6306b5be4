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
            pairs = [(it, it.grad) for it in group["params"] if it.grad is not None]
            if pairs:
                self._update([it for it, _ in pairs], [it for _, it in pairs], group)

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter][MOMENT] = torch.zeros_like(parameter)
        moments = [self.state[parameter][MOMENT] for parameter in parameters]
        (now, kept), rate = group["betas"], group["lr"]
        directions = torch._foreach_lerp(moments, gradients, 1 - now)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, directions, alpha=-rate)
        torch._foreach_lerp_(moments, gradients, 1 - kept)
