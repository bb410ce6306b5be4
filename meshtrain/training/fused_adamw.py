"""The step of AdamW by torch's fused kernel, for optimizers that keep its moments themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw


def fused_adamw(
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
) -> None:
    """Update parameters, their moments and their numbers of steps in place.

    Args:
        group: its `lr`, `betas`, `eps` and `weight_decay`.
        parameters: in one number format.
        gradients: of each.
        means: the mean of the gradients of each.
        squares: the mean of their squares.
        steps: () float32 each.
    """
    adamw(
        list(parameters),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(steps),
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
