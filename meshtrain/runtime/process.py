"""One process of a run: its device and its process group, from start to end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshtrain.errors import ConfigError
from meshtrain.runtime.environment import local_rank_from_environment, local_world_size_from_environment


@dataclass(frozen=True)
class Process:
    """Where this process stands.

    Attributes:
        rank: its number in the run.
        world_size: the number of processes.
        device: the device it computes on.
    """

    rank: int
    world_size: int
    device: torch.device


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
def run_process() -> Iterator[Process]:
    """Join the process group, and leave it when the block ends well.

    Tensors on either device can be reduced: gloo serves the CPU, NCCL the GPU. Started without torchrun, the process
    is alone.
    """
    device = _device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield Process(dist.get_rank(), dist.get_world_size(), device)
    # Without the barrier a rank that is done early is aborted at random by gloo's threads, exit code -6. After an
    # exception nobody is there to meet: the process just ends and its peers see the closed connection.
    dist.barrier()
    dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank_from_environment())
    torch.cuda.set_device(device)
    return device
