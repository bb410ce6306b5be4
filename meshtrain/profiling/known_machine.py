"""The machine for which a run is predicted, if one is known. Loads nothing of the simulation."""

import torch

from meshtrain.config.run import RunConfig
from meshtrain.planning.machine import NO_MACHINE, check_machine, machine_of_device
from meshtrain.runtime.environment import local_rank_from_environment


def known_machine(config: RunConfig) -> str | None:
    """Return the machine that a run names, or the shipped one of its GPU; None if there is none.

    Raises:
        ConfigError: if the run names a machine that there is not, or whose file is wrong.
    """
    if config.machine is not None:
        check_machine(config.machine)
        return None if config.machine == NO_MACHINE else config.machine
    if not torch.cuda.is_available():
        return None
    return machine_of_device(torch.cuda.get_device_name(local_rank_from_environment()))
