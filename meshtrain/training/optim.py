"""The optimizer and its learning rate."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from transformers import get_scheduler

from meshtrain.config.run import LearningRateConfig, OptimizerConfig
from meshtrain.errors import ConfigError
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline

MOMENTS = ("exp_avg", "exp_avg_sq")
# What transformers.get_scheduler would leave out without a word.
IGNORED = {"constant": ("warmup_steps", "arguments"), "constant_with_warmup": ("arguments",)}


class ShardedAdamW:
    """AdamW on what lies on this process, with torch's fused kernel on every device.

    It works on the local tensors inside the DTensors: elementwise arithmetic needs no layout, and the fused kernel
    takes no mixture of plain tensors and DTensors. Weight decay is for matrices: norms and biases are left out. Frozen
    parameters have no state, and a parameter without a gradient is left as it is, as in one process.
    """

    def __init__(self, pipeline: Pipeline, config: OptimizerConfig) -> None:
        self._parameters = dict(pipeline.trainable_parameters())
        self._shards = {name: _shard_of(parameter) for name, parameter in self._parameters.items()}
        matrices = [shard for name, shard in self._shards.items() if self._parameters[name].dim() >= 2]
        vectors = [shard for name, shard in self._shards.items() if self._parameters[name].dim() < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._shards[name].grad = None

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient."""
        for name, parameter in self._parameters.items():
            self._shards[name].grad = None if parameter.grad is None else local_tensor(parameter.grad)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return a parameter's two moments, laid out as the parameter; zeros before the first step."""
        state = self._state(name)
        return {moment: _laid_out_as(state[moment], self._parameters[name]) for moment in MOMENTS}

    def steps_done(self, name: str) -> Tensor:
        """Return (1,) float32: how many steps gave the parameter a gradient. Loading into it sets it."""
        return self._state(name)["step"].view(1)

    def _state(self, name: str) -> dict[str, Tensor]:
        shard = self._shards[name]
        state = self._adamw.state[shard]
        if not state:
            # What AdamW itself would make at its first step.
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(shard, memory_format=torch.preserve_format).detach()
        return state


def _shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter over the same memory as the local part of `parameter`."""
    return nn.Parameter(local_tensor(parameter.detach())) if isinstance(parameter, DTensor) else parameter


def _laid_out_as(local: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    # Not DTensor.from_local: it would move an offloaded moment to the device of the mesh, and what is loaded into that
    # copy would be lost.
    return DTensor(local, parameter._spec, requires_grad=False)


def build_learning_rate(config: LearningRateConfig, base: float, num_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 0.

    It is the function inside transformers' scheduler; as it depends on nothing but the step, a resumed run needs no
    scheduler state.

    Raises:
        ConfigError: for an argument that the schedule does not take, or a value that it cannot work with.
    """
    ignored = [key for key in IGNORED.get(config.name, ()) if getattr(config, key)]
    if ignored:
        what = f"the schedule {config.name!r} takes none; leave it out"
        raise ConfigError(f"learning_rate.{key}: {what}" for key in ignored)
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
        # Some arguments are looked at behind the warm-up only.
        factor(num_steps)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"learning_rate: the schedule {config.name!r} refuses its arguments: {error}") from error
    return lambda step: base * factor(step)
