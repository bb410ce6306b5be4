"""Compute something for many values, on all cores of this machine."""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from meshtrain.data.tokens.workers import num_cores
from meshtrain.runtime.environment import rank_from_environment, store_address_from_environment
from meshtrain.runtime.garbage_collection import rare_collections
from meshtrain.runtime.ranks import program_hidden, run_on_ranks

Result = TypeVar("Result")
SECONDS = 3600.0
# A process gets further values of a kind while it has at most so many more to do than the idlest.
MOST_AHEAD = 2.0


def on_all_cores(
    compute: Callable[..., Result],
    values: Sequence[Any],
    *args: Any,
    deadline: float = math.inf,
    costs: Sequence[float] = (),
    kinds: Sequence[Hashable] = (),
) -> list[Result]:
    """Return `compute(value, *args)` for each value, in order.

    Args:
        compute: a function that other processes find by its name.
        values: for which it is called.
        args: further arguments of it.
        deadline: on the monotonic clock. A process leaves out what would end later, judged by the
            time of what it has computed before. It computes at least one value, if others
            have left any.
        costs: about how long each value takes, relative to others; by default as long as others.
        kinds: equal for values that share what a process keeps; by default no value does.

    Raises:
        RankError: of the first process that raised.
    """
    if not values:
        return []
    workers = min(len(values), num_cores())
    costs, kinds = costs or [1.0] * len(values), kinds or range(len(values))
    owners = owners_of(workers, costs, kinds)
    with program_hidden():
        shares = run_on_ranks(
            workers, _share, compute, values, args, deadline, costs, owners, joins=False, timeout=SECONDS
        )
    found = {index: result for share in shares for index, result in share.items()}
    return [found[index] for index in sorted(found)]


def owners_of(workers: int, costs: Sequence[float], kinds: Sequence[Hashable]) -> list[int]:
    """Return the process that computes each value. Another one may take it over if that is busy.

    That is the one that has least to do, or the one with the last value of the same kind.

    Args:
        workers: number of processes.
        costs: of the values, in the order in which they are computed.
        kinds: of the values.
    """
    loads, latest, found = [0.0] * workers, dict[Hashable, int](), list[int]()
    for cost, kind in zip(costs, kinds, strict=True):
        idlest = loads.index(min(loads))
        owner = latest.get(kind, idlest)
        if loads[idlest] == 0 or loads[owner] > loads[idlest] + MOST_AHEAD * cost:
            owner = idlest
        latest[kind] = owner
        loads[owner] += cost
        found.append(owner)
    return found


def _share(
    compute: Callable[..., Result],
    values: Sequence[Any],
    args: Sequence[Any],
    deadline: float,
    costs: Sequence[float],
    owners: Sequence[int],
) -> dict[int, Result]:
    """Compute this process's share of the values, and then what others have not begun."""
    rank, store = rank_from_environment(), dist.TCPStore(*store_address_from_environment(), is_master=False)
    found: dict[int, Result] = {}
    slowest = 0.0
    with rare_collections():
        for index in sorted(range(len(values)), key=lambda index: owners[index] != rank):
            begin, cost = time.monotonic(), costs[index]
            if found and begin + slowest * cost > deadline:
                continue
            if store.add(f"begun {index}", 1) > 1:
                continue
            found[index] = compute(values[index], *args)
            slowest = max(slowest, (time.monotonic() - begin) / cost)
    return found
