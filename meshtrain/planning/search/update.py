"""What an update of the parameters needs, in closed form."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import torch
from torch import nn

from meshtrain.compat.fake import fake_tensors
from meshtrain.config.mesh import STAGE
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.planning.simulation.recorder import Recorder, Work
from meshtrain.planning.speed.rates import Rates
from meshtrain.training.matrix_exchange import ROUND, cost_of
from meshtrain.training.muon import computed_format, orthogonalized
from meshtrain.training.optim import optimizer_over
from meshtrain.training.parameter_groups import parameter_groups

# Shape of a matrix in a usual model: what an optimizer keeps may depend on it.
LARGE = (4_096, 4_096)
# Operators on the part of a matrix that a process holds: momentum, direction and step, and copies
# into and out of two messages. They read or write each number of the part so often in the number
# format of the parameters, and so often in that in which matrices are computed.
_OPERATORS, _OF_PARAMETER, _OF_COMPUTED = 7, 10, 12


class Matrices(NamedTuple):
    """Matrices of one shape.

    Attributes:
        shape: rows and columns of each.
        of_experts: whether each belongs to one expert. Such a matrix is not sharded over data axes.
    """

    shape: tuple[int, int]
    of_experts: bool

    @property
    def numel(self) -> int:
        """Return how many numbers one of them has."""
        return math.prod(self.shape)


Held = tuple[tuple[Matrices, int], ...]
"""Some matrices, and how many of each."""


def touched_bytes(config: OptimizerConfig, dtype: torch.dtype) -> float:
    """Return how many bytes an update reads and writes for each number of a parameter.

    Matrices that are updated as a whole are not meant.

    Args:
        config: of the optimizer.
        dtype: number format of the parameters.
    """
    config = config.model_copy(update={"groups": []})
    recorder = Recorder({}, answers=True)
    with fake_tensors():
        parameter = nn.Parameter(torch.empty(LARGE, dtype=dtype))
        named = [("weight", parameter)]
        optimizer = optimizer_over(named, parameter_groups(named, config), config, seed=0)
        # The first step makes the state.
        for watched in (nullcontext(), recorder):
            parameter.grad = torch.empty_like(parameter)
            with watched:
                optimizer.step()
    return sum(work.num_bytes * number for work, number in recorder.work().items()) / parameter.numel()


def joined(several: Iterable[Held]) -> Held:
    """Return all matrices of several layers."""
    total: Counter[Matrices] = Counter()
    for held in several:
        total.update(dict(held))
    return tuple(total.items())


def num_numbers(held: Held) -> int:
    """Return how many numbers some matrices have."""
    return sum(matrices.numel * number for matrices, number in held)


def update_seconds(held: Held, mesh: Sequence[int], dtype: torch.dtype, rates: Rates) -> float:
    """Return how long the processes of a stage take to update its matrices.

    Args:
        held: the matrices of the stage.
        mesh: degrees of all axes, in the order of `AXES`.
        dtype: number format of the parameters.
        rates: of the machine.
    """
    _, replicate, shard, ep, cp, tp = mesh
    sharding, computed = shard * ep * cp, computed_format(dtype)
    processes = replicate * sharding * tp
    shapes: Counter[tuple[int, int]] = Counter()
    operators = touched = there = back = 0.0
    for matrices, number in held:
        shapes[matrices.shape] += number
        # Experts are divided among processes before their matrices are.
        divided = sharding if matrices.of_experts else 1
        operators += _OPERATORS * number / divided
        part = matrices.numel * number / tp / sharding
        touched += part * (_OF_PARAMETER * dtype.itemsize + _OF_COMPUTED * computed.itemsize)
        there += part * computed.itemsize * (1 - divided / tp / sharding)
        back += part * computed.itemsize * (1 - divided / processes)
    owned = _orthogonalizing(tuple(shapes.items()), processes, computed)
    parts = Counter({Work("update", dtype, 0, int(touched / operators), None): math.ceil(operators)})
    seconds = max(rates.compute_seconds(work, in_optimizer=True) for work in owned)
    seconds += rates.compute_seconds(parts, in_optimizer=True)
    rounds = math.ceil(num_numbers(held) / processes / ROUND)
    return seconds + rounds * sum(_message_seconds(size / rounds, rates) for size in (there, back) if back)


def _message_seconds(num_bytes: float, rates: Rates) -> float:
    """Return the seconds of the message that brings matrices to their owners, or back."""
    return rates.message_seconds(Work("all_to_all", None, 0, int(num_bytes), STAGE))


def _shares(shapes: Mapping[tuple[int, int], int], processes: int) -> list[Counter[tuple[int, int]]]:
    """Return what a process owns, for all kinds of processes.

    The next matrix goes to the process with the least work, as in `MatrixExchange`. Processes with
    the same matrices are treated as one.
    """
    names = count()
    heap: list[tuple[int, int, int, Counter[tuple[int, int]]]] = [(0, next(names), processes, Counter())]
    for shape in sorted(shapes, key=cost_of, reverse=True):
        left = shapes[shape]
        while left:
            load, _, alike, owned = heappop(heap)
            given = min(left, alike)
            if given < alike:
                heappush(heap, (load, next(names), alike - given, owned))
            heappush(heap, (load + cost_of(shape), next(names), given, owned + Counter([shape])))
            left -= given
    return [owned for *_, owned in heap]


@cache
def _orthogonalizing(
    shapes: tuple[tuple[tuple[int, int], int], ...], processes: int, dtype: torch.dtype
) -> list[Counter[Work]]:
    """Return the work for the matrices that a process owns, for all kinds of processes.

    Args:
        shapes: of all matrices, and how many have each.
        processes: that share them.
        dtype: number format in which they are computed.
    """
    return [_work_of(owned, dtype) for owned in _shares(dict(shapes), processes)]


def _work_of(owned: Counter[tuple[int, int]], dtype: torch.dtype) -> Counter[Work]:
    """Return the work for the matrices of a process, of which some are computed together."""
    work: Counter[Work] = Counter()
    for shape, number in owned.items():
        together = max(1, ROUND // math.prod(shape))
        times, rest = divmod(number, together)
        for size, often in ((together, times), (rest, 1)):
            if size and often:
                work.update({kind: often * runs for kind, runs in _work_together(size, shape, dtype).items()})
    return work


@cache
def _work_together(number: int, shape: tuple[int, int], dtype: torch.dtype) -> Counter[Work]:
    """Return the work for matrices that are computed together."""
    with fake_tensors():
        matrices = torch.empty(number, *shape, dtype=dtype)
        with Recorder({}, answers=True) as recorder:
            orthogonalized(matrices)
    return recorder.work()
