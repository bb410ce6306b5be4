"""What torchrun says about this process; the only readers of its variables, and without torch."""

import os

LAUNCHER = "MESHTRAIN_LAUNCHER"
"""Set for the processes that `meshtrain train --processes` starts."""


def rank_from_environment() -> int:
    """Return this process's number in the run; 0 when not started by torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size_from_environment() -> int:
    """Return the number of processes in the run; 1 when not started by torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank_from_environment() -> int:
    """Return this process's number on its machine; 0 when not started by torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size_from_environment() -> int:
    """Return the number of processes of the run on this machine; 1 when not started by torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_launched() -> bool:
    """Whether torchrun, or something that does as it does, started this process."""
    return "RANK" in os.environ


def store_address_from_environment() -> tuple[str, int]:
    """Return host and port of the store of the run."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def attempt_from_environment() -> str:
    """Return the name of this start of the workers: another one after every restart by torchrun."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def agent_hosts_store() -> bool:
    """Whether torchrun's agent keeps the store, so that it outlives the workers."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_under_torchrun() -> bool:
    """Whether an agent of torchrun watches over this process, and hands signals on to it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def job_from_environment() -> str | None:
    """Return what names the job of this process over its restarts; None if nothing does.

    The name that torchrun was given may be another job's too, because a person or a launch script made it up.
    """
    if "SLURM_JOB_ID" in os.environ:
        return f"Slurm job {os.environ['SLURM_JOB_ID']}"
    # "none" is what torchrun calls a run that was given no name.
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"torchrun job {name}"


def requeues_from_environment() -> int:
    """Return how often Slurm has put the job of this process back into its queue."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def must_end_with_0() -> bool:
    """Whether any other exit code is taken for a failure: by torchrun, but not by `meshtrain train --processes`."""
    return is_under_torchrun() and LAUNCHER not in os.environ


def num_hosts_from_environment() -> int:
    """Return the number of machines of the run; 1 where nothing is said of machines."""
    if "GROUP_WORLD_SIZE" in os.environ:
        return int(os.environ["GROUP_WORLD_SIZE"])
    return world_size_from_environment() // int(os.environ.get("LOCAL_WORLD_SIZE", world_size_from_environment()))


def host_number_from_environment() -> int:
    """Return this machine's number among them."""
    return int(os.environ.get("GROUP_RANK", "0"))
