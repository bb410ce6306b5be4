"""The environment variables that torchrun, Slurm and `meshtrain train --processes` set.

This module does not import torch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

LAUNCHER = "MESHTRAIN_LAUNCHER"
"""Set for the processes that `meshtrain train --processes` starts."""


def rank_from_environment() -> int:
    """Return this process's rank in the run; 0 when it was not started by torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size_from_environment() -> int:
    """Return the number of processes in the run; 1 when this one was not started by torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank_from_environment() -> int:
    """Return this process's rank on its machine; 0 when it was not started by torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size_from_environment() -> int:
    """Return the run's number of processes on this machine; 1 when not started by torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_launched() -> bool:
    """Return whether torchrun, or a launcher that works like it, started this process."""
    return "RANK" in os.environ


def store_address_from_environment() -> tuple[str, int]:
    """Return host and port of the run's store."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def attempt_from_environment() -> str:
    """Return the name of this start of the workers. It changes after every restart by torchrun."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def agent_hosts_store() -> bool:
    """Return whether torchrun's agent hosts the store, so that it outlives the workers."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_under_torchrun() -> bool:
    """Return whether an agent of torchrun watches this process and forwards signals to it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def job_from_environment() -> str | None:
    """Return the name of this process's job, which stays the same over restarts; None if unknown.

    The name that torchrun was given may also be another job's, because a user or a launch script
    chose it.
    """
    if "SLURM_JOB_ID" in os.environ:
        return f"Slurm job {os.environ['SLURM_JOB_ID']}"
    # torchrun uses "none" for a run without a name.
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"torchrun job {name}"


def requeues_from_environment() -> int:
    """Return how often Slurm has put the job of this process back into its queue."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def must_end_with_0() -> bool:
    """Return whether the launcher takes any exit code other than 0 for a failure.

    torchrun does, but `meshtrain train --processes` does not.
    """
    return is_under_torchrun() and LAUNCHER not in os.environ


def num_hosts_from_environment() -> int:
    """Return the number of machines of the run; 1 if the environment does not name machines."""
    if "GROUP_WORLD_SIZE" in os.environ:
        return int(os.environ["GROUP_WORLD_SIZE"])
    return world_size_from_environment() // int(os.environ.get("LOCAL_WORLD_SIZE", world_size_from_environment()))


def host_number_from_environment() -> int:
    """Return this machine's number among the machines of the run."""
    return int(os.environ.get("GROUP_RANK", "0"))


@contextmanager
def variables_restored(*names: str) -> Iterator[None]:
    """Restore environment variables to their present values after the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
