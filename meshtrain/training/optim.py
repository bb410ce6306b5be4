"""The optimizer and its learning rate."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, AdamW, Optimizer

from meshtrain.config.optimizer import LearningRateConfig, OptimizerConfig
from meshtrain.errors import ConfigError, Problem
from meshtrain.models.positions import global_places
from meshtrain.parallel.local_parameter import as_local, full_parameter
from meshtrain.parallel.matrices import hidden_matrices
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.randomness import stream_key
from meshtrain.training.adafactor import Adafactor
from meshtrain.training.blockwise_adamw import BlockwiseAdamW
from meshtrain.training.lion import Lion
from meshtrain.training.matrix_exchange import MatrixExchange
from meshtrain.training.muon import Muon
from meshtrain.training.parameter_groups import parameter_groups
from meshtrain.training.rounded_adamw import RoundedAdamW
from meshtrain.training.schedule_free import ScheduleFreeAdamW
from meshtrain.training.sharded_sums import ShardedSums

# Keys that transformers.get_scheduler would ignore silently.
IGNORED = {
    "constant": ("warmup_steps", "arguments"),
    "constant_with_warmup": ("arguments",),
    "exponential": ("warmup_steps",),
}


def build_optimizer(
    pipeline: Pipeline, config: OptimizerConfig, local: Callable[[nn.Parameter], nn.Parameter] = as_local
) -> Optimizer:
    """Build the optimizer of a run over the local parts of the parameters.

    It uses torch's fused kernel for AdamW. Weight decay applies to matrices; norms and biases are
    left out. Frozen parameters are not in the optimizer. A parameter without a gradient stays as it
    is, as in one process.

    Args:
        pipeline: whose parameters it trains.
        config: of the run.
        local: returns the local part of a parameter.
    """
    fqns = pipeline.canonical_names()
    locals_of = {name: (local(parameter), parameter) for name, parameter in pipeline.trainable_parameters()}
    trained = [(fqns[name], own) for name, (own, _) in locals_of.items()]
    # The groups of a run have stock names, also those of parameters that are kept in parts.
    stock_names = {part: entry.name for entry in pipeline.fused for part in entry.parts}
    matrices: dict[Tensor, Tensor] = {}
    if config.takes_whole_matrices:
        hidden = {name for stage in pipeline.stages for name in hidden_matrices(stage)}
        matrices = {own: full for name, (own, full) in locals_of.items() if name in hidden}
    groups = parameter_groups(((stock_names.get(name, name), it) for name, it in trained), config, matrices)
    return optimizer_over(
        trained,
        groups,
        config,
        seed=pipeline.streams.seed,
        matrices=matrices,
        full=dict(locals_of.values()),
        mesh=pipeline.mesh,
    )


def optimizer_over(
    parameters: Sequence[tuple[str, nn.Parameter]],
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    *,
    seed: int,
    matrices: Mapping[Tensor, Tensor] = MappingProxyType({}),
    full: Mapping[Tensor, Tensor] = MappingProxyType({}),
    mesh: DeviceMesh | None = None,
) -> Optimizer:
    """Build the optimizer of a run over parameters.

    Args:
        parameters: FQN and local part of each. Copies of a tied weight have one FQN.
        groups: of these parameters.
        config: of the run.
        seed: of the run, for stochastic rounding.
        matrices: those of them that Muon updates, if it is the optimizer -> the model's parameter.
        full: local part -> the model's parameter, for those that may be sharded.
        mesh: all processes; None: this one is alone.
    """
    betas = config.beta1, config.beta2
    if config.name == "sgd":
        # The fused kernel needs a gradient of every parameter in the first step.
        return SGD(groups, lr=config.learning_rate, momentum=config.beta1, foreach=True)
    if config.name == "lion":
        return Lion(groups, lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay)
    if config.name == "adafactor":
        sums = ShardedSums({parameter: full.get(parameter, parameter) for _, parameter in parameters}, mesh)
        own = {"beta2_decay": config.beta2_decay, "clipping_threshold": config.clipping_threshold}
        return Adafactor(groups, sums, lr=config.learning_rate, weight_decay=config.weight_decay, **own)
    options: dict[str, Any] = {"lr": config.learning_rate, "betas": betas, "eps": config.epsilon}
    if config.name == "adamw-8bit":
        shapes: dict[Tensor, Sequence[int]] = {it: full.get(it, it).shape for _, it in parameters}
        return BlockwiseAdamW(groups, shapes, weight_decay=config.weight_decay, **options)
    if config.name == "adamw-schedule-free":
        return ScheduleFreeAdamW(groups, weight_decay=config.weight_decay, **options)
    if config.name == "muon":
        options |= {"muon_momentum": config.muon_momentum, "adjust_lr_fn": config.adjust_lr_fn}
        return Muon(groups, MatrixExchange(matrices, mesh), weight_decay=config.weight_decay, **options)
    if config.state == "parameters":
        return AdamW(groups, **options, fused=True)
    keys: dict[Tensor, int] = {parameter: stream_key(seed, "optimizer", fqn) for fqn, parameter in parameters}
    places: dict[Tensor, tuple[Tensor, Tensor]] = {
        parameter: global_places(full_parameter(parameter).detach()) for _, parameter in parameters
    }
    return RoundedAdamW(groups, keys, places, **options)


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
    if config.name == "exponential":
        return _exponential(config.arguments, base, num_steps)
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


def _exponential(arguments: Mapping[str, Any], last: float, num_steps: int) -> Callable[[int], float]:
    """Return the learning rate that changes by the same factor in each step.

    Raises:
        ConfigError: for other arguments than the rate of the first step.
    """
    first = arguments.get("lr_start")
    is_rate = isinstance(first, int | float) and not isinstance(first, bool) and 0 < first < math.inf
    if arguments.keys() != {"lr_start"} or not is_rate:
        raise ConfigError(
            f"learning_rate.arguments: the schedule 'exponential' takes only lr_start, a number above 0, found "
            f"{dict(arguments)}",
            "write arguments = { lr_start = 1e-7 }",
        )
    assert first is not None
    return lambda step: first * (last / first) ** (step / max(1, num_steps - 1))
