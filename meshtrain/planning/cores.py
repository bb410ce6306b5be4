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
    compute: Callable[..., Result], values: Sequence[Any], *args: Any, deadline: float = math.inf
) -> list[Result]:
    """Return `compute(value, *args)` for each value, in order.

    Args:
        compute: a function that other processes find by its name.
        values: for which it is called.
        args: further arguments of it.
        deadline: on the monotonic clock. A process begins no further value that would take longer
            if it took as long as its slowest one so far. The results of those that were not begun
            are left out.

    Raises:
        RankError: of the first process that raised.
    """
    if not values:
        return []
    workers = min(len(values), num_cores())
    with program_hidden():
        shares = run_on_ranks(workers, _share, compute, values, args, deadline, joins=False, timeout=SECONDS)
    found = {index: result for share in shares for index, result in share.items()}
    return [found[index] for index in sorted(found)]


def _share(
    compute: Callable[..., Result], values: Sequence[Any], args: Sequence[Any], deadline: float
) -> dict[int, Result]:
    """Compute this process's share of the values."""
    found: dict[int, Result] = {}
    slowest = 0.0
    with rare_collections():
        for index in range(int(os.environ["RANK"]), len(values), int(os.environ["WORLD_SIZE"])):
            begin = time.monotonic()
            if found and begin + slowest > deadline:
                break
            found[index] = compute(values[index], *args)
            slowest = max(slowest, time.monotonic() - begin)
    return found
