"""What torchrun says about this process; the only readers of its variables, and without torch."""

import os


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
