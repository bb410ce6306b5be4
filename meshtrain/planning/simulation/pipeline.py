"""Simulate every process of a run that differs from the others."""

import math
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing import current_process

import torch.distributed as dist

from meshtrain.compat.schedules import BACKWARD, FORWARD, Pass, pass_orders
from meshtrain.config.schedules import SCHEDULES
from meshtrain.data.tokens.workers import num_cores
from meshtrain.errors import UserError
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.schedule import stage_owners
from meshtrain.planning.simulation.fewer_layers import LayersNeededError
from meshtrain.planning.simulation.outline import Outline, StageOutline, outline_of
from meshtrain.planning.simulation.profile import RankProfile
from meshtrain.planning.simulation.rank import SimulatedRun
from meshtrain.planning.simulation.task import Task
from meshtrain.runtime.ranks import RankError, run_on_ranks

# A few first microbatches, the last ones, and one between them. Without a pipeline the first and
# the last alone differ from the others.
FEWEST, FEWEST_ALONE = 6, 3
SECONDS = 3600.0
# Number of forward passes of layers that take about as long as the start of other processes.
MOST_HERE = 200


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
        return _simulate(run, outline_of(run, all_layers=False))
    except LayersNeededError:
        return _simulate(run, outline_of(run, all_layers=True))


def _simulate(run: SimulatedRun, outline: Outline) -> Simulation:
    plan, stages = run.plan, outline.stages
    owners = stage_owners(plan.pipeline, plan.mesh.pp)
    number = num_microbatches(plan, run.batch)
    held = _stages_of_ranks(owners)
    kinds = [_rank_kind(stages, indices) for indices in held]
    # The last of them, which has the fewest microbatches at once.
    alike = {kind: rank for rank, kind in enumerate(kinds)}
    simulated = _simulate_ranks(run, outline, sorted(alike.values()), held)
    profiles = []
    for kind, indices, order in zip(kinds, held, _orders(run, owners, number), strict=True):
        profile, simulated_as = simulated[alike[kind]]
        profiles.append(profile.with_passes(number, order, dict(zip(indices, simulated_as, strict=True))))
    firsts = accumulate((len(stage.layers) for stage in stages[:-1]), initial=0)
    return Simulation(tuple(profiles), tuple(firsts))


def _rank_kind(stages: Sequence[StageOutline], held: Sequence[int]) -> tuple[Hashable, ...]:
    """Return a value that is equal for pp ranks that compute and send the same."""
    return tuple((stages[stage].kind, stage + 1 in held) for stage in held)


def _simulate_ranks(
    run: SimulatedRun, outline: Outline, chosen: Sequence[int], held: Sequence[tuple[int, ...]]
) -> dict[int, tuple[RankProfile, tuple[int, ...]]]:
    """Simulate some pp ranks, in a shorter pipeline if that is possible.

    Returns:
        pp rank -> its profile, with a few microbatches, and the numbers that its stages have in it.
    """
    short, stages, ranks = run, outline.stages, list(chosen)
    if outline.is_stream and len(chosen) < len(held):
        kept = sorted(stage for rank in chosen for stage in held[rank])
        some = [outline.stages[stage] for stage in kept]
        if _keeps_patterns(run, some) and _is_like(run, chosen, kept, held):
            mesh = run.plan.mesh.model_copy(update={"pp": len(chosen)})
            short = replace(run, plan=run.plan.model_copy(update={"mesh": mesh}))
            stages, ranks = tuple(some), list(range(len(chosen)))
    owners = stage_owners(short.plan.pipeline, short.plan.mesh.pp)
    number = min(num_microbatches(run.plan, run.batch), _fewest_microbatches(short, len(owners)))
    orders, own = _orders(short, owners, number), _stages_of_ranks(owners)
    width = short.plan.mesh.world_size // short.plan.mesh.pp
    tasks = [Task(rank * width, _with_microbatches(short, number), stages, own[rank]) for rank in ranks]
    found = _simulate_all(tasks)
    for rank, profile in zip(ranks, found, strict=True):
        if profile.passes() != orders[rank]:
            raise RuntimeError(f"torch runs {profile.passes()} on pp rank {rank}, and not {orders[rank]}")
    return {rank: (profile, own[short_rank]) for rank, profile, short_rank in zip(chosen, found, ranks, strict=True)}


def _stages_of_ranks(owners: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(s for s, owner in enumerate(owners) if owner == rank) for rank in range(max(owners) + 1)]


def _is_like(run: SimulatedRun, chosen: Sequence[int], kept: Sequence[int], held: Sequence[tuple[int, ...]]) -> bool:
    """Return whether a pipeline of the chosen ranks alone would give them the same stages."""
    own = _stages_of_ranks(stage_owners(run.plan.pipeline, len(chosen)))
    return [tuple(kept[stage] for stage in stages) for stages in own] == [held[rank] for rank in chosen]


def _keeps_patterns(run: SimulatedRun, stages: Sequence[StageOutline]) -> bool:
    """Return whether the same layers recompute if only some stages exist."""
    layers = [layer for stage in stages for layer in stage.layers]
    return all((layer - position) % run.plan.recompute.every == 0 for position, layer in enumerate(layers))


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
    if schedule.microbatches == "one per stage":
        return max(num_stages, FEWEST)
    unit = run.plan.mesh.pp if schedule.microbatches == "equal rounds" else 1
    return unit * math.ceil(FEWEST / unit)


def _with_microbatches(run: SimulatedRun, number: int) -> SimulatedRun:
    size = number * run.batch.micro_batch_size * run.plan.mesh.data_degree
    return replace(run, batch=replace(run.batch, global_batch_size=size))


def _simulate_all(tasks: Sequence[Task]) -> list[RankProfile]:
    """Simulate some processes, on all cores of this machine if that is worth their start."""
    may_start = not current_process().daemon and len(tasks) > 1
    if not dist.is_initialized() and not (may_start and sum(task.num_layer_passes for task in tasks) > MOST_HERE):
        return [task.simulate() for task in tasks]
    workers = min(len(tasks), num_cores())
    try:
        answers = run_on_ranks(workers, _simulate_share, tasks, joins=False, timeout=SECONDS)
    except RankError as error:
        if isinstance(error.original, UserError | LayersNeededError):
            raise error.original from None
        raise error from None
    found = {rank: profile for answer in answers for rank, profile in answer}
    return [found[task.rank] for task in tasks]


def _simulate_share(tasks: Sequence[Task]) -> list[tuple[int, RankProfile]]:
    """Simulate this worker's share of some processes."""
    own = tasks[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    return [(task.rank, task.simulate()) for task in own]
