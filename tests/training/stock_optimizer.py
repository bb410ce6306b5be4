"""The optimizer of a run, as torch has it, for the parameters of a stock model."""

from collections.abc import Sequence

import torch
from torch import nn

from meshtrain.config.optimizer import OptimizerConfig


def stock_adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW with the settings of a run, whose weight decay is for matrices alone."""
    groups = [
        {"params": [it for it in parameters if (it.dim() >= 2) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon)
