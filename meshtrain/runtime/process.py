"""One process of a run: its device and its process group, from start to end."""

import atexit
import itertools
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
from meshtrain.errors import ConfigError
from meshtrain.runtime.activity import HangLimits
from meshtrain.runtime.environment import (
    is_launched,
    local_rank_from_environment,
    local_world_size_from_environment,
    rank_from_environment,
    world_size_from_environment,
)
from meshtrain.runtime.flight_recorder import switch_on_recorder
from meshtrain.runtime.guard import Guard
from meshtrain.runtime.hosts import check_hosts
from meshtrain.runtime.lifetime import end_with_torchrun
from meshtrain.runtime.signals import StopRequest, catch_stop_signals, tell_of_crashes
from meshtrain.runtime.store import hosts_store, open_store

LONGEST_COLLECTIVE = timedelta(days=1)
JOIN_SECONDS = 1800.0
LEAVE_SECONDS = 60.0
LEAVING = "meshtrain/leaving"
_STARTS = itertools.count()
"""The process groups that this process has joined: all processes of a program join the same ones."""


@dataclass(frozen=True)
class Process:
    """Where this process stands.

    Attributes:
        rank: its number in the run.
        world_size: the number of processes.
        device: the device it computes on.
        guard: what watches over it.
        stop: whether somebody wants it to stop.
    """

    rank: int
    world_size: int
    device: torch.device
    guard: Guard
    stop: StopRequest


def check_devices() -> None:
    """Check that every process on this machine has a GPU of its own, where there are any.

    Raises:
        ConfigError: before anything is done.
    """
    gpus, processes = torch.cuda.device_count(), local_world_size_from_environment()
    if torch.cuda.is_available() and processes > gpus:
        raise ConfigError(
            f"{processes} processes are started on this machine, which has {gpus} GPUs; start as many, or set "
            "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )


@contextmanager
def run_process(directory: Path, limits: HangLimits) -> Iterator[Process]:
    """Join the process group, watch over it, and leave it when the block ends well.

    Tensors on either device can be reduced: gloo serves the CPU, NCCL the GPU. Started without torchrun, the process
    is alone. A block that raises ends all processes, see `meshtrain.runtime.guard`.

    Args:
        directory: of the run, where the reason of a failure is written.
        limits: how long things may take.

    Raises:
        HostError: if the machines of the run cannot reach each other.
    """
    switch_on_recorder()
    start = next(_STARTS)
    device, store = _join(limits.first_step_seconds, start)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Not before: a process that waits for others to join has nothing to save, and should end at once.
    with catch_stop_signals() as stop:
        guard = Guard(
            open_store(limits.first_step_seconds, start) if is_launched() else store,
            rank,
            world_size,
            directory=directory,
            limits=limits,
            hosts_store=hosts_store(),
            is_stopping=stop.is_asked,
        )
        with guard.watching():
            yield Process(rank, world_size, device, guard, stop)
            guard.expect_end()
            _meet_at_the_end()
        dist.destroy_process_group()


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the process group for work that a person waits for, so that nobody watches over it; see `run_process`.

    Raises:
        HostError: if the machines cannot reach each other.
    """
    device, _ = _join(JOIN_SECONDS, next(_STARTS))
    yield device
    _meet_at_the_end()
    dist.destroy_process_group()


def join_for_script() -> torch.device:
    """Join the process group for a program of the user's, unless it has joined by itself, and return its device.

    Whoever joins leaves: a group that was made here is taken down when the program ends.

    Raises:
        HostError: if the machines cannot reach each other.
        ConfigError: if the group that is there cannot reduce tensors on both the CPU and the GPU.
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
            f"the process group has no backend for {' and '.join(sorted(lacking))}; join with "
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl"), or leave it to meshtrain.parallelize'
        )
    return device


def _leave_at_exit() -> None:
    # Python sets it for an exception that ended the program: then nobody is there to meet.
    if not dist.is_initialized() or hasattr(sys, "last_type"):
        return
    store, begin = default_store(), time.monotonic()
    try:
        store.add(LEAVING, 1)
        # Not a barrier: a process that has ended by `sys.exit` elsewhere would be waited for half an hour.
        while store.add(LEAVING, 0) < dist.get_world_size() and time.monotonic() < begin + LEAVE_SECONDS:
            time.sleep(0.02)
        if (missing := dist.get_world_size() - store.add(LEAVING, 0)) > 0:
            sys.stderr.write(
                f"rank {dist.get_rank()} has come to its end, and {missing} other ranks have not within "
                f"{LEAVE_SECONDS:.0f} s: it leaves, and what they still wait for together fails\n"
            )
    except dist.DistError:
        # Its host has gone already, so everybody has come.
        return
    dist.destroy_process_group()


def _join(seconds: float, start: int) -> tuple[torch.device, dist.Store]:
    tell_of_crashes()
    end_with_torchrun()
    device = _device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = open_store(seconds, start) if is_launched() else dist.HashStore()
    check_hosts(store, seconds)
    dist.init_process_group(
        backend, store=store, rank=rank_from_environment(), world_size=world_size_from_environment()
    )
    return device, store


def _meet_at_the_end() -> None:
    # Without it a rank that is done early is aborted at random by gloo's threads, exit code -6. After an exception
    # nobody is there to meet: the process just ends.
    dist.barrier()


def lift_timeouts() -> None:
    """Leave it to the guard to say that something takes too long: torch's own timeouts name nobody."""
    set_timeouts(LONGEST_COLLECTIVE)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank_from_environment())
    torch.cuda.set_device(device)
    return device
