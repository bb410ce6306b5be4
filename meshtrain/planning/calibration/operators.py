"""How long operators take on this machine."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from meshtrain.planning.calibration.calls import Call

# Every point is measured for about as long, in a few rounds.
SECONDS, ROUNDS = 0.04, 5
# Operators are measured several times, far apart in time. Where other programs share the memory of
# the machine, its speed changes for seconds at a time.
PASSES, PASS_SECONDS = 3, 0.01
# More than the caches of a processor hold.
COLD_BYTES, MOST_COPIES = 2**26, 16
Point = tuple[float, float]


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Return how long an action takes: the median of a few rounds.

    Args:
        action: is called many times.
        device: that computes it.
    """
    action()
    return statistics.median(_rounds_of(action, device, SECONDS))


def _rounds_of(action: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Return how long an action takes in each of a few rounds."""
    number = max(1, min(2000, int(seconds / ROUNDS / max(_timed(action, 1, device), 1e-7))))
    return [_timed(action, number, device) for _ in range(ROUNDS)]


def _timed(action: Callable[[], object], number: int, device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(number):
        action()
    _synchronize(device)
    return (time.perf_counter() - begin) / number


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure_operators(calls: Sequence[Call], device: torch.device) -> tuple[dict[str, list[Point]], dict[str, str]]:
    """Measure calls of operators, each on all processes at the same time. Collective.

    Returns:
        Operator -> points [operations or bytes, seconds], ascending. And operator -> why this
        device does not run it as it was called in the simulation, which runs as on a CPU.
    """
    rounds: list[list[float]] = [[] for _ in calls]
    others: dict[str, str] = {}
    failed: set[int] = set()
    for index, call in PASSES * [*enumerate(calls)]:
        # Processes on one CPU share its memory, and do the same at the same time in a step. A call
        # may fail on one process alone, so all go through all calls.
        dist.barrier()
        if index in failed:
            continue
        try:
            rounds[index] += _rounds_in_turn(call, device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            if device.type == "cpu":
                raise
            others[call.key] = str(error).splitlines()[0]
            failed.add(index)
    found: dict[str, list[Point]] = {}
    for index, call in enumerate(calls):
        if index not in failed:
            found.setdefault(call.key, []).append((float(call.size), statistics.median(rounds[index])))
    return found, others


def _rounds_in_turn(call: Call, device: torch.device) -> list[float]:
    rotation = _Rotation(call, device)
    rotation.fill()
    return _rounds_of(rotation, device, PASS_SECONDS)


class _Rotation:
    """Calls an operator with other tensors each time.

    In a step, an operator finds little of what it needs in the caches of the processor, and what it
    returns is kept for a while.
    """

    def __init__(self, call: Call, device: torch.device) -> None:
        self._number = max(2, min(MOST_COPIES, COLD_BYTES // max(1, call.num_bytes)))
        self._actions = deque(call.on(device) for _ in range(self._number))
        self._results: deque[object] = deque(maxlen=self._number)

    def fill(self) -> None:
        """Keep as many results as later. A process takes memory from the system only until then."""
        for _ in range(self._number):
            self()

    def __call__(self) -> None:
        action = self._actions[0]
        self._actions.rotate(-1)
        self._results.append(action())


def measure_memory(device: torch.device) -> list[Point]:
    """Return points [bytes, 10^9 bytes per second] of a sum of two tensors."""
    points = []
    for exponent in range(12, 28, 3):
        one, other, result = (torch.ones(2**exponent // 4, device=device) for _ in range(3))
        seconds = seconds_of(lambda: torch.add(one, other, out=result), device)  # noqa: B023 - called at once
        points.append((3.0 * 2**exponent, 3 * 2**exponent / seconds / 1e9))
    return points


def measure_products(dtype: torch.dtype, device: torch.device, widths: Sequence[int]) -> list[Point]:
    """Return points [operations, 10^12 operations per second] of products of square matrices."""
    points = []
    for width in widths:
        # A GPU multiplies equal numbers faster than others, because they take less power.
        one, other = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        seconds = seconds_of(lambda: one @ other, device)  # noqa: B023 - called at once
        points.append((2.0 * width**3, 2 * width**3 / seconds / 1e12))
    return points


def measure_attention(dtype: torch.dtype, device: torch.device, lengths: Sequence[int]) -> list[Point]:
    """Return points [operations, 10^12 operations per second] of causal attention."""
    points = []
    for length in lengths:
        heads, width = 8, 64
        query, key, value = (torch.randn(1, heads, length, width, device=device).to(dtype) for _ in range(3))
        attend = torch.nn.functional.scaled_dot_product_attention
        seconds = seconds_of(lambda: attend(query, key, value, is_causal=True), device)  # noqa: B023 - called at once
        # As torch counts: the masked half is included.
        flops = 4.0 * heads * width * length**2
        points.append((flops, flops / seconds / 1e12))
    return points
