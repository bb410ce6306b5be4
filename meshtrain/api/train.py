"""The function `train`: the training of a run file inside a program."""

from collections.abc import Iterable

import torch.distributed as dist

from meshtrain import console
from meshtrain.config.arguments import wrong
from meshtrain.config.run import RunConfig
from meshtrain.errors import ConfigError
from meshtrain.profiling.hook import profile_hooks
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.training.hooks import Hook, check_hooks
from meshtrain.training.run import Ending, train_run
from meshtrain.verify.first_use import ensure_proven


def train(config: RunConfig, hooks: Iterable[Hook] = ()) -> Ending:
    """Train a run, or resume it from its newest checkpoint, as `meshtrain train` does with hooks.

    Every process that torchrun has started calls it; without torchrun the process is alone. It
    joins the process group and leaves it.

    Args:
        config: as `load_run` reads it.
        hooks: objects of subclasses of `Hook`, called after the built-in ones. If the run has
            nothing left to do, no hook is called.

    Returns:
        Why training has ended: `Ending.DONE`, or asked to stop (by a signal, by `stop_after` or by
        a hook) with everything saved.

    Raises:
        ConfigError: if the program has joined a process group before, or a hook is not a `Hook` or
            would not be called.
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
    console.configure(rank=rank_from_environment())
    return train_run(config, [*profile_hooks(config), *own], prove=ensure_proven)
