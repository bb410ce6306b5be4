"""The key-value store through which the processes of a run communicate."""

import socket
from datetime import timedelta

import torch.distributed as dist

from meshtrain.errors import HostError
from meshtrain.runtime.environment import (
    agent_hosts_store,
    attempt_from_environment,
    is_launched,
    rank_from_environment,
    store_address_from_environment,
    world_size_from_environment,
)

CONNECT_SECONDS = 60.0


def open_store(timeout_seconds: float, start: int = 0) -> dist.Store:
    """Open a connection to the store of the run, and host the store if this process must.

    Values belong to one start of the workers. If torchrun keeps its store over a restart, the store
    still holds the addresses of the previous workers, which no longer answer. A new store needs no
    name for the start and must have none: torchrun counts restarts on each machine, and a machine
    that came back counts from the beginning. Values are also separate for each process group
    that the same workers create in one program.

    Args:
        timeout_seconds: how long a read waits for what others write. Also how long a connection
            waits for a store that a process of the run hosts, because that process may come late.
        start: number of process groups that these workers have created before.

    Raises:
        HostError: if the store cannot be reached.
    """
    host, port = store_address_from_environment()
    connect_seconds = CONNECT_SECONDS if agent_hosts_store() else timeout_seconds
    try:
        store = dist.TCPStore(
            host,
            port,
            world_size=None,
            is_master=hosts_store(),
            timeout=timedelta(seconds=connect_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise HostError(_problem(error, host, port, connect_seconds)) from error
    store.set_timeout(timedelta(seconds=timeout_seconds))
    attempt = f"{attempt_from_environment()}/{world_size_from_environment()}" if agent_hosts_store() else "only"
    return dist.PrefixStore(f"meshtrain/{attempt}/{start}", store)


def _problem(error: dist.DistError, host: str, port: int, seconds: float) -> str:
    where = f"rank {rank_from_environment()} on {socket.gethostname()}"
    if "EADDRINUSE" in str(error):
        return (
            f"{where} cannot host the store of the run: another program took port {port}, which was free when it was "
            "chosen; start again, with another MASTER_PORT if you set it yourself"
        )
    return (
        f"{where} cannot reach the store of the run at {host}:{port} within {seconds:.0f} s: check MASTER_ADDR, "
        f"MASTER_PORT and the firewall of {host}"
    )


def hosts_store() -> bool:
    """Return whether this process hosts the store, so that the store ends with it."""
    return is_launched() and not agent_hosts_store() and rank_from_environment() == 0
