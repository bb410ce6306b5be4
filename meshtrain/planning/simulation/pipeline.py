"""Simulate every process of a run that differs from the others."""

import copy
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from meshtrain.compat.schedules import BACKWARD, FORWARD, Pass, pass_orders
from meshtrain.config.schedules import SCHEDULES
from meshtrain.data.tokens.workers import num_cores
from meshtrain.errors import UserError
from meshtrain.models.build import build_meta_model
from meshtrain.models.dtypes import DTYPES
from meshtrain.models.fused import unfuse
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.cut.stage import Stage, cut
from meshtrain.parallel.schedule import stage_owners
from meshtrain.planning.simulation.profile import RankProfile
from meshtrain.planning.simulation.rank import SimulatedRun, simulate_rank
from meshtrain.runtime.ranks import RankError, program_hidden, run_on_ranks

# A few first microbatches, the last ones, and one between them.
FEWEST = 6
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

    Processes with like stages are simulated once, with as few microbatches as the schedule allows.
    The steps of the others are put together from the passes of that simulation, in the order of
    their schedule.
    """
    plan = run.plan
    owners = stage_owners(plan.pipeline, plan.mesh.pp)
    number = num_microbatches(plan, run.batch)
    short = min(number, _fewest_microbatches(run, len(owners)))
    orders, short_orders = (_orders(run, owners, some) for some in (number, short))
    stages = _stages_of(run)
    kinds = [_kind(stage, run) for stage in stages]
    held = [tuple(stage for stage, owner in enumerate(owners) if owner == rank) for rank in range(plan.mesh.pp)]
    alike: dict[tuple[object, ...], int] = {}
    for rank, indices in enumerate(held):
        # The last of them, which has the fewest microbatches at once.
        alike[tuple(kinds[stage] for stage in indices)] = rank
    chosen = sorted(alike.values())
    simulated = dict(zip(chosen, _simulate_ranks(_shortened(run, short), chosen), strict=True))
    for rank, profile in simulated.items():
        if profile.passes() != short_orders[rank]:
            raise RuntimeError(f"torch runs {profile.passes()} on pp rank {rank}, and not {short_orders[rank]}")
    profiles = []
    for rank, indices in enumerate(held):
        like = alike[tuple(kinds[stage] for stage in indices)]
        mapping = dict(zip(indices, held[like], strict=True))
        profiles.append(simulated[like].with_passes(number, orders[rank], mapping))
    firsts = tuple(stage.first_layer for stage in stages)
    return Simulation(tuple(profiles), firsts)


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
    unit = num_stages if schedule.microbatches == "one per stage" else run.plan.mesh.pp
    return unit * math.ceil(FEWEST / unit)


def _shortened(run: SimulatedRun, number: int) -> SimulatedRun:
    size = number * run.batch.micro_batch_size * run.plan.mesh.data_degree
    return replace(run, batch=replace(run.batch, global_batch_size=size))


def _stages_of(run: SimulatedRun) -> list[Stage]:
    model = build_meta_model(
        copy.deepcopy(run.hf_config),
        dtype=DTYPES[run.plan.precision.parameters],
        attention=run.attention,
        trust_remote_code=run.trust_remote_code,
    )
    unfuse(model, run.plan.tensor.fused)
    layers = run.plan.pipeline.layers_per_stage
    assert isinstance(layers, list), "the plan is not resolved"
    return cut(model, layers, range(len(layers)), getattr(torch, run.plan.precision.compute))


def _kind(stage: Stage, run: SimulatedRun) -> tuple[object, ...]:
    """Return a value that is equal for stages that compute the same."""
    types = getattr(run.hf_config.get_text_config(), "layer_types", None) or ()
    shapes = []
    for index, layer in enumerate(stage.own_layers(), start=stage.first_layer):
        parameters = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        recomputes = index % run.plan.recompute.every == 0
        shapes.append((type(layer), types[index : index + 1], recomputes, parameters))
    received, sent = stage.channel.routes.received if stage.structure else (), len(stage.tied)
    return stage.is_first, stage.is_last, len(received), sent, tuple(map(str, shapes))


def _simulate_ranks(run: SimulatedRun, chosen: Sequence[int]) -> list[RankProfile]:
    """Simulate the first process of some pp ranks."""
    width = run.plan.mesh.world_size // run.plan.mesh.pp
    ranks = [rank * width for rank in chosen]
    found = {} if dist.is_initialized() else _simulate_here(run, ranks)
    if left := [rank for rank in ranks if rank not in found]:
        found |= _simulate_on_cores(run, left)
    return [found[rank] for rank in ranks]


def _simulate_here(run: SimulatedRun, ranks: Sequence[int]) -> dict[int, RankProfile]:
    """Simulate some ranks one after the other, as long as more processes would not be faster."""
    # A daemonic process may not start others.
    must_work_alone = multiprocessing.current_process().daemon
    found: dict[int, RankProfile] = {}
    for rank in ranks:
        begin = time.monotonic()
        found[rank] = simulate_rank(run, rank)
        seconds_left = (time.monotonic() - begin) * (len(ranks) - len(found))
        if seconds_left > START_SECONDS and not must_work_alone:
            break
    return found


def _simulate_on_cores(run: SimulatedRun, ranks: Sequence[int]) -> dict[int, RankProfile]:
    """Simulate some ranks on all cores of this machine."""
    workers = min(len(ranks), num_cores())
    try:
        with program_hidden():
            answers = run_on_ranks(workers, _simulate_share, run, ranks, joins=False, timeout=SECONDS)
    except RankError as error:
        raise (error.original if isinstance(error.original, UserError) else error) from None
    return {rank: profile for answer in answers for rank, profile in answer}


def _simulate_share(run: SimulatedRun, ranks: Sequence[int]) -> list[tuple[int, RankProfile]]:
    """Simulate this worker's share of some ranks."""
    own = ranks[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    return [(rank, simulate_rank(run, rank)) for rank in own]
