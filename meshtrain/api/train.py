"""The function `train`: the training of a run file inside a program."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from meshtrain import console
from meshtrain.config.arguments import wrong
from meshtrain.config.objective import STOCK_OBJECTIVE
from meshtrain.config.run import RunConfig
from meshtrain.errors import ConfigError
from meshtrain.parallel.head.chunks import LossFunction
from meshtrain.profiling.known_machine import known_machine
from meshtrain.profiling.prediction_file import NoPrediction
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.runtime.process import check_devices
from meshtrain.training.evaluators import Evaluator
from meshtrain.training.hooks import Hook, check_hooks
from meshtrain.training.own_loss import check_own_loss
from meshtrain.training.resolve import ResolvedRun
from meshtrain.training.run import Ending, train_run
from meshtrain.verify.first_use import ensure_model_proven, ensure_proven

if TYPE_CHECKING:
    from meshtrain.profiling.prediction_hook import PredictionHook


def train(config: RunConfig, hooks: Iterable[Hook] = (), *, loss: LossFunction | None = None) -> Ending:
    """Train a run, or resume it from its newest checkpoint, as `meshtrain train` does with hooks.

    Every process that torchrun has started calls it; without torchrun the process is alone. It
    joins the process group and leaves it.

    Args:
        config: as `load_run` reads it.
        hooks: objects of subclasses of `Hook`, called after the built-in ones. If the run has
            nothing left to do, no hook is called.
        loss: the loss to minimize: a function of logits (batch, seq, vocab), in at least float32,
            and labels (batch, seq), int64, which are those of the next tokens, or -100 where a
            token must not count. It returns the () sum over the tokens that count. Each process
            calls it for parts of a batch: microbatches, parts of sequences, chunks. The sum over
            all is divided by the number of trained tokens. Evaluations are those of the
            cross-entropy. None: what the configuration says.

    Returns:
        Why training has ended: `Ending.DONE`, or asked to stop (by a signal, by `stop_after` or by
        a hook) with everything saved.

    Raises:
        ConfigError: if the program has joined a process group before, a hook is not a `Hook` or
            would not be called, or the loss is not a sum over tokens, as a few random ones show.
        UserError: for anything else that the user can fix; the message has a line for each problem.

    Source: the loop of torchtitan (arXiv:2410.06511), with the hooks of Colossal-AI and
    transformers.TrainerCallback.
    """
    if not isinstance(config, RunConfig):
        raise wrong("train: config", config, "what meshtrain.load_run(path) returns")
    if dist.is_initialized():
        raise ConfigError(
            "train joins the process group by itself, and this program has joined one already",
            "call it in a program of its own, or leave that group with torch.distributed.destroy_process_group()",
        )
    own = check_hooks(hooks)
    if loss is not None:
        _check_alone(config)
    console.configure(rank=rank_from_environment())
    # Before the name of this process's GPU is asked for, which decides what is predicted.
    check_devices()
    predicting = _prediction_hooks(config)

    def before_joining(resolved: ResolvedRun) -> None:
        if loss is not None:
            check_own_loss("train: loss", loss, resolved.hf_config.get_text_config().vocab_size)
        ensure_proven(resolved)
        if resolved.teacher is not None and config.model.prove_unknown_class:
            ensure_model_proven(resolved.teacher.build_model(), resolved.teacher.plan)
        for hook in predicting:
            hook.predict(resolved)

    first: Sequence[Hook] = predicting or [NoPrediction()]
    hooks_of_run = [*first, *_profile_hooks(config), *own]
    return train_run(config, hooks_of_run, before_joining, _evaluators(config), loss)


def _check_alone(config: RunConfig) -> None:
    """Check that a run has no loss beside the program's own.

    Raises:
        ConfigError: if it has.
    """
    tables = {
        "objective": config.objective != STOCK_OBJECTIVE,
        "preference": config.preference.loss is not None,
        "distillation": config.distillation.teacher is not None,
    }
    for table, is_set in tables.items():
        if is_set:
            raise ConfigError(
                f"train: loss replaces the loss of the run, but its table [{table}] is not empty",
                "leave one of them out",
            )
    if config.data.has_weights:
        raise ConfigError(
            "train: loss replaces the loss of the run, but its data has weights (weight_key), which it would not get",
            "leave one of them out",
        )


def _evaluators(config: RunConfig) -> Sequence[Evaluator]:
    """Return what evaluates the model between steps, besides the loss on validation data."""
    if not config.tasks.names and not config.generate.prompts:
        return []
    from meshtrain.inference.run_evaluators import evaluators_of  # noqa: PLC0415 - loads generation

    return evaluators_of(config)


def _prediction_hooks(config: RunConfig) -> "list[PredictionHook]":
    """Return the hook that shows what is predicted; none if no machine is known."""
    machine = known_machine(config)
    if machine is None:
        return []
    from meshtrain.profiling.prediction_hook import PredictionHook  # noqa: PLC0415 - loads the simulation

    return [PredictionHook(machine)]


def _profile_hooks(config: RunConfig) -> Sequence[Hook]:
    """Return the hook that measures the steps of `profile.steps`; none if there are none."""
    if config.profile.steps is None:
        return []
    from meshtrain.profiling.hook import profile_hooks  # noqa: PLC0415 - loads the simulation

    return profile_hooks(config)
