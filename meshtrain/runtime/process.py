"""One process of a run: its device, its process group and the store, from start to end."""

import atexit
import itertools
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshtrain.compat.distributed import default_store, device_types, set_timeouts
from meshtrain.config.plan import EIGHT_BITS
from meshtrain.errors import ConfigError, HostError, Problem
from meshtrain.runtime.activity import HangLimits
from meshtrain.runtime.environment import (
    agent_hosts_store,
    attempt_from_environment,
    is_launched,
    local_rank_from_environment,
    local_world_size_from_environment,
    rank_from_environment,
    store_address_from_environment,
    variables_restored,
    world_size_from_environment,
)
from meshtrain.runtime.flight_recorder import RECORDER_SIZE, switch_on_recorder
from meshtrain.runtime.guard import Guard
from meshtrain.runtime.host_memory import keep_freed_memory
from meshtrain.runtime.hosts import GLOO_INTERFACE, check_hosts
from meshtrain.runtime.lifetime import end_with_torchrun
from meshtrain.runtime.signals import StopRequest, catch_stop_signals, crashes_reported, report_crashes

LONGEST_COLLECTIVE = timedelta(days=1)
JOIN_SECONDS = 1800.0
CONNECT_SECONDS = 60.0
LEAVE_SECONDS = 60.0
LEAVING = "meshtrain/leaving"
# Number format of products -> what multiplies in it.
CAPABILITIES = {"float8": (8, 9), "mxfp8": (10, 0)}
_STARTS = itertools.count()
"""Number of process groups that this process has joined. All processes join the same ones."""


@dataclass(frozen=True)
class Process:
    """Rank, device and guard of this process.

    Attributes:
        rank: its number in the run.
        world_size: number of processes.
        device: the device on which it computes.
        guard: watches this process and the others.
        stop: whether this process was asked to stop.
    """

    rank: int
    world_size: int
    device: torch.device
    guard: Guard
    stop: StopRequest


def check_devices() -> None:
    """Check that every process on this machine has its own GPU, if there are GPUs.

    Raises:
        ConfigError: if there are more processes than GPUs.
    """
    gpus, processes = torch.cuda.device_count(), local_world_size_from_environment()
    if torch.cuda.is_available() and processes > gpus:
        raise ConfigError(
            f"{processes} processes are started on this machine, which has {gpus} GPUs",
            "start at most as many, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU",
        )


def check_number_format(products: str) -> None:
    """Check that the GPU of this process, if there is one, multiplies in a number format.

    Args:
        products: number format of the products of linear layers.

    Raises:
        ConfigError: if its tensor cores do not know the format.
    """
    if products not in CAPABILITIES or not torch.cuda.is_available():
        return
    check_devices()
    (setting, instead), needed = EIGHT_BITS[products], CAPABILITIES[products]
    # A program that has joined has chosen its device, which may be the only one that it sees.
    index = torch.cuda.current_device() if dist.is_initialized() else local_rank_from_environment()
    found = torch.cuda.get_device_capability(index)
    # GPUs of AMD have other formats of 8 bits.
    if found < needed or torch.version.hip is not None:
        raise ConfigError(
            f"{setting} needs a GPU of NVIDIA with compute capability {'.'.join(map(str, needed))} or higher; "
            f"{torch.cuda.get_device_name(index)} has {'.'.join(map(str, found))}",
            instead,
        )


def check_peer_memory(tp: int) -> None:
    """Check that the GPUs of this process and of the others of its tp group share their memory.

    Raises:
        ConfigError: if they do not, or there are none.
    """
    instead = "leave tensor.async_tp out"
    processes, own = local_world_size_from_environment(), local_rank_from_environment()
    if processes % tp:
        raise ConfigError(
            f"tensor.async_tp needs all processes of tp = {tp} on one machine, and this machine has {processes}",
            f"{instead}, or use a tp that divides that number",
        )
    if not torch.cuda.is_available():
        raise ConfigError("tensor.async_tp needs GPUs that reach each other's memory, and there are none", instead)
    check_devices()
    group = range(own // tp * tp, own // tp * tp + tp)
    for peer in group:
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            raise ConfigError(f"tensor.async_tp: GPU {own} does not reach the memory of GPU {peer}", instead)


@contextmanager
def run_process(directory: Path, limits: HangLimits) -> Iterator[Process]:
    """Join the process group, watch over it, and leave it when the block ends well.

    Tensors on either device can be reduced: gloo serves the CPU, NCCL the GPU. Without torchrun,
    the process is alone. If the block raises, all processes end, see `meshtrain.runtime.guard`.

    Args:
        directory: of the run, where the reason of a failure is written.
        limits: how long the parts of the run may take.

    Raises:
        HostError: if the machines of the run cannot reach each other.
    """
    with _settings_restored():
        switch_on_recorder()
        start = next(_STARTS)
        device, store = _join(limits.first_step_seconds, start)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # Signals are caught only now: a process that waits for others to join has nothing to save,
        # and should end at once.
        with catch_stop_signals() as stop:
            guard = Guard(
                open_store(limits.first_step_seconds, start) if is_launched() else store,
                rank,
                world_size,
                directory=directory,
                limits=limits,
                hosts_store=_hosts_store(),
                is_stopping=stop.is_asked,
            )
            with guard.watching():
                yield Process(rank, world_size, device, guard, stop)
                guard.expect_end()
                _wait_for_all()
            dist.destroy_process_group()


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the process group while the block runs, without a guard.

    This is for work during which the user waits, so that no guard is needed; see `run_process`.

    Raises:
        HostError: if the machines cannot reach each other.
    """
    with _settings_restored():
        device, _ = _join(JOIN_SECONDS, next(_STARTS))
        yield device
        _wait_for_all()
        dist.destroy_process_group()


@contextmanager
def _settings_restored() -> Iterator[None]:
    """Restore after the block the settings of this process that joining a process group changes.

    These are crash reports, gloo's network interface and the size of the flight recorder. Some
    changes stay. torch creates its flight recorder once per process. The thread that ends this
    process with torchrun runs on, because the program also must not outlive torchrun. The GPU of
    this process stays the current one: to ask for the previous one would allocate memory there.
    """
    with variables_restored(RECORDER_SIZE, GLOO_INTERFACE), crashes_reported():
        yield


def join_for_script() -> torch.device:
    """Join the process group for a user's own program, and return its device.

    A program that has joined by itself keeps its group and all its settings, and leaves the group
    by itself. A group that is created here is left when the program ends. Until then crash reports
    stay enabled, and GLOO_SOCKET_IFNAME keeps the interface that was chosen: the program creates
    more groups later, and the threads of gloo may crash at any time.

    Raises:
        HostError: if the machines cannot reach each other.
        ConfigError: if an existing group cannot reduce tensors on both the CPU and the GPU.
    """
    if not dist.is_initialized():
        check_devices()
        device, _ = _join(JOIN_SECONDS, next(_STARTS))
        atexit.register(_leave_at_exit)
        return device
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kinds = device_types(dist.group.WORLD) if dist.group.WORLD is not None else set()
    if lacking := {"cpu", device.type} - kinds:
        raise ConfigError(
            f"the process group has no backend for {' and '.join(sorted(lacking))}",
            'join with torch.distributed.init_process_group("cpu:gloo,cuda:nccl"), or leave it to '
            "meshtrain.parallelize",
        )
    return device


def _leave_at_exit() -> None:
    # Python sets `last_type` when an exception ended the program. Then no other process waits.
    if not dist.is_initialized() or hasattr(sys, "last_type"):
        return
    store, begin = default_store(), time.monotonic()
    try:
        store.add(LEAVING, 1)
        # This is not a barrier, which would wait half an hour for a process that ended elsewhere by
        # `sys.exit`.
        while store.add(LEAVING, 0) < dist.get_world_size() and time.monotonic() < begin + LEAVE_SECONDS:
            time.sleep(0.02)
        if (missing := dist.get_world_size() - store.add(LEAVING, 0)) > 0:
            rank = dist.get_rank()
            others, their = ("1 other rank has", "its") if missing == 1 else (f"{missing} other ranks have", "their")
            sys.stderr.write(
                f"rank {rank} has finished, but {others} not finished within {LEAVE_SECONDS:.0f} s. Rank {rank} "
                f"leaves, so {their} next collective will fail\n"
            )
    except dist.DistError:
        # The host of the store has left already, so all processes have reached their end.
        return
    dist.destroy_process_group()


def _join(seconds: float, start: int) -> tuple[torch.device, dist.Store]:
    report_crashes()
    end_with_torchrun()
    device = _device()
    if device.type == "cpu":
        keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = open_store(seconds, start) if is_launched() else dist.HashStore()
    check_hosts(store, seconds)
    dist.init_process_group(
        backend, store=store, rank=rank_from_environment(), world_size=world_size_from_environment()
    )
    return device, store


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
            is_master=_hosts_store(),
            timeout=timedelta(seconds=connect_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise HostError(_store_problem(error, host, port, connect_seconds)) from error
    store.set_timeout(timedelta(seconds=timeout_seconds))
    attempt = f"{attempt_from_environment()}/{world_size_from_environment()}" if agent_hosts_store() else "only"
    return dist.PrefixStore(f"meshtrain/{attempt}/{start}", store)


def _store_problem(error: dist.DistError, host: str, port: int, seconds: float) -> Problem:
    where = f"rank {rank_from_environment()} on {socket.gethostname()}"
    if "EADDRINUSE" in str(error):
        return Problem(
            f"{where} cannot host the store of the run: another program took port {port}, which was free when it was "
            "chosen",
            "start again, with another MASTER_PORT if you set it yourself",
        )
    return Problem(
        f"{where} cannot reach the store of the run at {host}:{port} within {seconds:.0f} s",
        f"check MASTER_ADDR, MASTER_PORT and the firewall of {host}",
    )


def _hosts_store() -> bool:
    """Return whether this process hosts the store, so that the store ends with it."""
    return is_launched() and not agent_hosts_store() and rank_from_environment() == 0


def _wait_for_all() -> None:
    # Without the barrier, gloo's threads may abort a rank that is done early, with exit code -6.
    # After an exception no other process waits, so this one just ends.
    dist.barrier()


def lift_timeouts() -> None:
    """Disable torch's own timeouts, which name no process. The guard reports hangs instead."""
    set_timeouts(LONGEST_COLLECTIVE)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank_from_environment())
    torch.cuda.set_device(device)
    return device
