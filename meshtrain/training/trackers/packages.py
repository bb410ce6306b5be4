"""The check that the packages of the trackers are installed. This module loads no torch."""

from importlib.util import find_spec

from meshtrain.config.run import RunConfig
from meshtrain.errors import ConfigError, Problem
from meshtrain.runtime.environment import rank_from_environment


def check_trackers(config: RunConfig) -> None:
    """Check that every tracker of a run has its package, on the rank that opens them.

    Raises:
        ConfigError: with every package that is missing.
    """
    if rank_from_environment() != 0:
        return
    # meshtrain requires TensorBoard. For the others, package, module and extra have one name.
    missing = [name for name in config.logging.trackers if name != "tensorboard" and not _is_installed(name)]
    if missing:
        raise ConfigError(
            Problem(
                f"the tracker {name!r} needs a package that is not installed",
                f'run pip install "meshtrain[{name}]"',
                "logging.trackers",
            )
            for name in missing
        )


def _is_installed(module: str) -> bool:
    spec = find_spec(module)
    # A folder of that name, which wandb leaves where it ran, is found too. It has no origin.
    return spec is not None and spec.origin is not None
