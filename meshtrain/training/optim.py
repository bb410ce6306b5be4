"""The optimizer and its learning rate."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from meshtrain.config.run import LearningRateConfig, OptimizerConfig
from meshtrain.errors import ConfigError, Problem
from meshtrain.parallel.local_parameter import as_local
from meshtrain.parallel.pipeline import Pipeline

# Keys that transformers.get_scheduler would ignore silently.
IGNORED = {"constant": ("warmup_steps", "arguments"), "constant_with_warmup": ("arguments",)}


def build_optimizer(pipeline: Pipeline, config: OptimizerConfig) -> AdamW:
    """Build AdamW over the local parts of the parameters.

    It uses torch's fused kernel on every device. Weight decay applies to matrices; norms and biases
    are left out. Frozen parameters are not in the optimizer. A parameter without a gradient stays
    as it is, as in one process.
    """
    trained = [parameter for _, parameter in pipeline.trainable_parameters()]
    matrices = [as_local(parameter) for parameter in trained if parameter.dim() >= 2]
    vectors = [as_local(parameter) for parameter in trained if parameter.dim() < 2]
    return AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def build_learning_rate(config: LearningRateConfig, base: float, num_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 0.

    It is the function inside transformers' scheduler. It depends only on the step, so a resumed run
    needs no scheduler state.

    Raises:
        ConfigError: for an argument that the schedule does not take, or a value that it cannot use.
    """
    from transformers import get_scheduler  # noqa: PLC0415 - with it comes all of peft, where that is installed

    ignored = [key for key in IGNORED.get(config.name, ()) if getattr(config, key)]
    if ignored:
        unused = Problem(f"the schedule {config.name!r} does not use it", "leave it out")
        raise ConfigError(unused.concerning(f"learning_rate.{key}") for key in ignored)
    carrier: Optimizer = SGD([nn.Parameter(torch.zeros(()))], lr=base)
    try:
        scheduler = get_scheduler(
            config.name,
            carrier,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=config.arguments or None,
        )
        factor = scheduler.lr_lambdas[0]
        # Some arguments are read only after the warm-up.
        factor(num_steps)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"learning_rate: the schedule {config.name!r} refuses its arguments: {error}") from error
    return lambda step: base * factor(step)
