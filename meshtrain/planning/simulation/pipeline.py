"""Simulate every process of a run that differs from the others."""

import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch.distributed as dist

from meshtrain.compat.schedules import BACKWARD, FORWARD, Pass, pass_orders
from meshtrain.config.schedules import SCHEDULES
from meshtrain.data.tokens.workers import num_cores
from meshtrain.errors import UserError
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.schedule import stage_owners
from meshtrain.planning.simulation.fewer_layers import LayersNeededError
from meshtrain.planning.simulation.outline import StageOutline, outline_stages
from meshtrain.planning.simulation.profile import RankProfile
from meshtrain.planning.simulation.rank import SimulatedRun
from meshtrain.planning.simulation.task import Task
from meshtrain.runtime.ranks import RankError, program_hidden, run_on_ranks

# A few first microbatches, the last ones, and one between them. Without a pipeline the first and
# the last alone differ from the others.
FEWEST, FEWEST_ALONE = 6, 3
SECONDS = 3600.0
# More processes import torch and transformers first, which takes about as long.
START_SECONDS = 8.0


@dataclass(frozen=True)
class Simulation:
    """What the processes of a run do in a step.

    Attributes:
        profiles: of the first process of each pp rank.
        first_layers: index of the first layer of each stage.
    """

    profiles: tuple[RankProfile, ...]
    first_layers: tuple[int, ...]


def simulate(run: SimulatedRun) -> Simulation:
    """Simulate the first process of each pp rank.

    Processes with like stages are simulated once, with as few microbatches as the schedule allows,
    and with a few layers of each kind. The steps of all processes are put together from the passes
    of that simulation, in the order of their schedule.
    """
    try:
        return _simulate(run, outline_stages(run, all_layers=False))
    except LayersNeededError:
        return _simulate(run, outline_stages(run, all_layers=True))


def _simulate(run: SimulatedRun, stages: Sequence[StageOutline]) -> Simulation:
    plan = run.plan
    owners = stage_owners(plan.pipeline, plan.mesh.pp)
    number = num_microbatches(plan, run.batch)
    short = min(number, _fewest_microbatches(run, len(owners)))
    orders, short_orders = (_orders(run, owners, some) for some in (number, short))
    held = [tuple(stage for stage, owner in enumerate(owners) if owner == rank) for rank in range(plan.mesh.pp)]
    alike: dict[tuple[object, ...], int] = {}
    for rank, indices in enumerate(held):
        # The last of them, which has the fewest microbatches at once.
        alike[tuple(stages[stage].kind for stage in indices)] = rank
    chosen = sorted(alike.values())
    width = plan.mesh.world_size // plan.mesh.pp
    tasks = [Task(rank * width, _shortened(run, short), tuple(stages), held[rank]) for rank in chosen]
    simulated = dict(zip(chosen, _simulate_all(tasks), strict=True))
    for rank, profile in simulated.items():
        if profile.passes() != short_orders[rank]:
            raise RuntimeError(f"torch runs {profile.passes()} on pp rank {rank}, and not {short_orders[rank]}")
    profiles = []
    for rank, indices in enumerate(held):
        like = alike[tuple(stages[stage].kind for stage in indices)]
        mapping = dict(zip(indices, held[like], strict=True))
        profiles.append(simulated[like].with_passes(number, orders[rank], mapping))
    firsts = accumulate((len(stage.layers) for stage in stages[:-1]), initial=0)
    return Simulation(tuple(profiles), tuple(firsts))


def _orders(run: SimulatedRun, owners: list[int], number: int) -> list[list[Pass]]:
    if len(owners) == 1:
        return [[Pass(phase, 0, microbatch) for microbatch in range(number) for phase in (FORWARD, BACKWARD)]]
    return pass_orders(run.plan.pipeline.schedule, owners, number)


def _fewest_microbatches(run: SimulatedRun, num_stages: int) -> int:
    """Return how many microbatches show what any number does."""
    schedule = SCHEDULES[run.plan.pipeline.schedule]
    if run.plan.pipeline.schedule == "DualPipeV":
        # It splits the backward passes of some microbatches only.
        return num_microbatches(run.plan, run.batch)
    if num_stages == 1:
        return FEWEST_ALONE
    unit = num_stages if schedule.microbatches == "one per stage" else run.plan.mesh.pp
    return unit * math.ceil(FEWEST / unit)


def _shortened(run: SimulatedRun, number: int) -> SimulatedRun:
    size = number * run.batch.micro_batch_size * run.plan.mesh.data_degree
    return replace(run, batch=replace(run.batch, global_batch_size=size))


def _simulate_all(tasks: Sequence[Task]) -> list[RankProfile]:
    """Simulate some processes."""
    found = {} if dist.is_initialized() else _simulate_here(tasks)
    if left := [task for task in tasks if task.rank not in found]:
        found |= _simulate_on_cores(left)
    return [found[task.rank] for task in tasks]


def _simulate_here(tasks: Sequence[Task]) -> dict[int, RankProfile]:
    """Simulate some processes one after the other, as long as more would not be faster."""
    # A daemonic process may not start others.
    must_work_alone = multiprocessing.current_process().daemon
    found: dict[int, RankProfile] = {}
    for task in tasks:
        begin = time.monotonic()
        found[task.rank] = task.simulate()
        seconds_left = (time.monotonic() - begin) * (len(tasks) - len(found))
        if seconds_left > START_SECONDS and not must_work_alone:
            break
    return found


def _simulate_on_cores(tasks: Sequence[Task]) -> dict[int, RankProfile]:
    """Simulate some processes on all cores of this machine."""
    workers = min(len(tasks), num_cores())
    try:
        with program_hidden():
            answers = run_on_ranks(workers, _simulate_share, tasks, joins=False, timeout=SECONDS)
    except RankError as error:
        if isinstance(error.original, UserError | LayersNeededError):
            raise error.original from None
        raise
    return {rank: profile for answer in answers for rank, profile in answer}


def _simulate_share(tasks: Sequence[Task]) -> list[tuple[int, RankProfile]]:
    """Simulate this worker's share of some processes."""
    own = tasks[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    return [(task.rank, task.simulate()) for task in own]
