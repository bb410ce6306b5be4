"""The optimizer and its learning rate."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from transformers import get_scheduler

from meshtrain.config.run import LearningRateConfig, OptimizerConfig
from meshtrain.errors import ConfigError
from meshtrain.parallel.pipeline import Pipeline


def build_optimizer(pipeline: Pipeline, config: OptimizerConfig) -> AdamW:
    """Build AdamW over this process's parameters, with torch's fused kernel on every device.

    Weight decay is for matrices: norms and biases (fewer than two dimensions) are left out.
    """
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for _, parameter in pipeline.named_parameters():
        (matrices if parameter.dim() >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def build_learning_rate(config: LearningRateConfig, base: float, num_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 0.

    It is the function inside transformers' scheduler; as it depends on nothing but the step, a resumed run needs no
    scheduler state.

    Raises:
        ConfigError: for an argument that the schedule does not take.
    """
    carrier: Optimizer = SGD([nn.Parameter(torch.zeros(()))], lr=base)
    try:
        scheduler = get_scheduler(
            config.name,
            carrier,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=config.arguments or None,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"learning_rate: the schedule {config.name!r} refuses its arguments: {error}") from error
    factor = scheduler.lr_lambdas[0]
    return lambda step: base * factor(step)


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = value
