"""How long messages take on this machine.

In a step, processes compute between messages, and do not come to one at the same time. So each
message is measured after a matrix product, whose own time is subtracted. A CPU posts the sums over
copies of the model in a backward pass, and awaits them after it. So those are measured beside
products.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.compat.distributed import all_gather_single, reduce_scatter_single
from meshtrain.config.machine import POSTED, LinkConfig
from meshtrain.planning.calibration.operators import Point
from meshtrain.planning.speed.rates import FASTEST
from meshtrain.runtime.environment import local_world_size_from_environment

SIZES = tuple(4**exponent for exponent in range(5, 13))
SECONDS, ROUNDS, MOST = 0.5, 5, 20
# Rows and columns of the matrices that are multiplied between messages, which takes about as long
# as a message.
WIDTH = {"cpu": 384, "cuda": 1024}


def measure_messages(device: torch.device) -> dict[str, dict[str, list[Point]]]:
    """Return message -> number of processes -> points [bytes, seconds]. Collective.

    The groups are of neighboring processes. All groups of a size send at the same time, as they do
    in a step.
    """
    found: dict[str, dict[str, list[Point]]] = {name: {} for name in _ACTIONS}
    world_size, on_host = dist.get_world_size(), local_world_size_from_environment()
    for size in range(2, on_host + 1):
        if on_host % size:
            continue
        groups = [dist.new_group(range(first, first + size)) for first in range(0, world_size, size)]
        group = groups[dist.get_rank() // size]
        for name, action in _ACTIONS.items():
            found[name][str(size)] = [
                (float(num_bytes), _seconds(action, num_bytes, size, group, device)) for num_bytes in SIZES
            ]
        if device.type == "cpu":
            found.setdefault(POSTED, {})[str(size)] = [
                (num_bytes, _posted_seconds(int(num_bytes), seconds, group))
                for num_bytes, seconds in found["all_reduce"][str(size)]
            ]
    return found


def link_between_hosts(device: torch.device) -> LinkConfig:
    """Return the connection of processes on different hosts. Collective.

    On one host, it is that of processes on the same host.
    """
    world_size, on_host = dist.get_world_size(), local_world_size_from_environment()
    step = on_host if world_size > on_host else 1
    groups = [dist.new_group(range(first, world_size, step)) for first in range(step)]
    group = groups[dist.get_rank() % step]
    size = dist.get_world_size(group)
    return link_of([(float(num_bytes), _seconds(_send, num_bytes, size, group, device)) for num_bytes in SIZES])


def link_of(points: Sequence[Point]) -> LinkConfig:
    """Return the latency and the bandwidth of a connection from points [bytes, seconds]."""
    (_, latency), (before_size, before), (size, seconds) = points[0], points[-2], points[-1]
    if seconds <= before:
        # Neither is known well, so the time of the largest message counts as a whole.
        return LinkConfig(gb_per_second=size / seconds / 1e9, seconds=latency)
    return LinkConfig(gb_per_second=(size - before_size) / (seconds - before) / 1e9, seconds=latency)


def _seconds(action: "_Action", num_bytes: int, size: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of a message, the same on all processes."""
    number = num_bytes // 4 // size * size
    full, part = torch.ones(number, device=device), torch.ones(number // size, device=device)
    matrix = torch.ones(2 * [WIDTH[device.type]], device=device)

    def compute() -> None:
        torch.mm(matrix, matrix)

    def compute_and_send() -> None:
        compute()
        action(full, part, group)

    return _difference(compute_and_send, compute, device)


def _posted_seconds(num_bytes: int, awaited: float, group: dist.ProcessGroup) -> float:
    """Return how much longer a process of a CPU computes if an all_reduce travels meanwhile.

    Args:
        num_bytes: of the message.
        awaited: seconds that it takes if the process waits for it.
        group: the processes that send it.
    """
    full, matrix = torch.ones(num_bytes // 4), torch.ones(2 * [WIDTH["cpu"]])

    def multiply() -> None:
        torch.mm(matrix, matrix)

    number = math.ceil(2 * awaited / _timed(multiply, MOST, matrix.device))

    def compute() -> None:
        for _ in range(number):
            multiply()

    def compute_and_send() -> None:
        message = dist.all_reduce(full, group=group, async_op=True)
        assert message is not None
        compute()
        message.wait()

    return _difference(compute_and_send, compute, matrix.device)


def _difference(both: Callable[[], None], alone: Callable[[], None], device: torch.device) -> float:
    """Return how much longer an act takes than another, which is a part of it. Collective."""
    both()
    repeats = max(1, min(MOST, int(SECONDS / (2 * ROUNDS * _timed(both, 2, device)))))
    # They take turns, so that a slow moment of the machine meets both.
    pairs = [[_timed(act, repeats, device) for act in (both, alone)] for _ in range(ROUNDS)]
    return max(statistics.median(longer - shorter for longer, shorter in pairs), FASTEST)


def _timed(act: Callable[[], None], number: int, device: torch.device) -> float:
    """Return the mean seconds of an act. Collective; the slowest process counts."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(number):
        act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = torch.tensor((time.perf_counter() - begin) / number, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _all_reduce(full: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(full, group=group)


def _all_gather(full: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    all_gather_single(full, part, group=group)


def _reduce_scatter(full: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    reduce_scatter_single(part, full, group=group)


def _send(full: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Send to the next process of the group, and receive from the previous one."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(full)
    # One after the other, two processes would both send first, and wait forever on NCCL.
    both = [
        dist.P2POp(dist.isend, full, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


_Action = Callable[[Tensor, Tensor, dist.ProcessGroup], None]
_ACTIONS: dict[str, _Action] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "send": _send,
}
