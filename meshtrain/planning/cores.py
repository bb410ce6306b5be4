"""Compute something for many values, on all cores of this machine."""

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from meshtrain.data.tokens.workers import num_cores
from meshtrain.runtime.garbage_collection import rare_collections
from meshtrain.runtime.ranks import program_hidden, run_on_ranks

Result = TypeVar("Result")
SECONDS = 3600.0


def on_all_cores(
    compute: Callable[..., Result],
    values: Sequence[Any],
    *args: Any,
    deadline: float = math.inf,
    costs: Sequence[float] = (),
) -> list[Result]:
    """Return `compute(value, *args)` for each value, in order.

    Args:
        compute: a function that other processes find by its name.
        values: for which it is called.
        args: further arguments of it.
        deadline: on the monotonic clock. A process leaves out what would end later, judged by the
            time of what it has computed before. It computes at least one value.
        costs: about how long each value takes, relative to others; by default as long as others.

    Raises:
        RankError: of the first process that raised.
    """
    if not values:
        return []
    workers = min(len(values), num_cores())
    with program_hidden():
        shares = run_on_ranks(workers, _share, compute, values, args, deadline, costs, joins=False, timeout=SECONDS)
    found = {index: result for share in shares for index, result in share.items()}
    return [found[index] for index in sorted(found)]


def _share(
    compute: Callable[..., Result],
    values: Sequence[Any],
    args: Sequence[Any],
    deadline: float,
    costs: Sequence[float],
) -> dict[int, Result]:
    """Compute this process's share of the values."""
    found: dict[int, Result] = {}
    slowest = 0.0
    with rare_collections():
        for index in range(int(os.environ["RANK"]), len(values), int(os.environ["WORLD_SIZE"])):
            begin, cost = time.monotonic(), costs[index] if costs else 1.0
            if found and begin + slowest * cost > deadline:
                continue
            found[index] = compute(values[index], *args)
            slowest = max(slowest, (time.monotonic() - begin) / cost)
    return found
