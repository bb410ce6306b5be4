"""How long operators take on this machine."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from meshtrain.planning.calibration.calls import Call, with_values

# Every point is measured for about as long, in a few rounds.
SECONDS, ROUNDS = 0.04, 5
Point = tuple[float, float]


def seconds_of(action: Callable[[], object], device: torch.device, *, seconds: float = SECONDS) -> float:
    """Return how long an action takes: the median of a few rounds.

    Args:
        action: is called many times.
        device: that computes it.
        seconds: for all rounds.
    """
    action()
    number = max(1, min(2000, int(seconds / ROUNDS / max(_timed(action, 1, device), 1e-7))))
    return statistics.median(_timed(action, number, device) for _ in range(ROUNDS))


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
def measure_operators(calls: Sequence[Call], device: torch.device) -> dict[str, list[Point]]:
    """Return operator -> points [operations or bytes, seconds], ascending."""
    found: dict[str, list[Point]] = {}
    for call in calls:
        args, kwargs = with_values(list(call.args), device), with_values(call.kwargs, device)
        seconds = seconds_of(lambda: call.run(args, kwargs), device)  # noqa: B023 - called at once
        found.setdefault(call.key, []).append((float(call.size), seconds))
    return found


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
        one, other = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
        seconds = seconds_of(lambda: one @ other, device)  # noqa: B023 - called at once
        points.append((2.0 * width**3, 2 * width**3 / seconds / 1e12))
    return points


def measure_attention(dtype: torch.dtype, device: torch.device, lengths: Sequence[int]) -> list[Point]:
    """Return points [operations, 10^12 operations per second] of causal attention."""
    points = []
    for length in lengths:
        heads, width = 8, 64
        query, key, value = (torch.ones(1, heads, length, width, dtype=dtype, device=device) for _ in range(3))
        attend = torch.nn.functional.scaled_dot_product_attention
        seconds = seconds_of(lambda: attend(query, key, value, is_causal=True), device)  # noqa: B023 - called at once
        # As torch counts: the masked half is included.
        flops = 4.0 * heads * width * length**2
        points.append((flops, flops / seconds / 1e12))
    return points
