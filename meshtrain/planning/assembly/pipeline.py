"""Simulate every process of a run that differs from the others."""

from collections import ChainMap, Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing import current_process
from typing import NamedTuple

import torch.distributed as dist

from meshtrain.compat.schedules import BACKWARD, FORWARD, Instruction
from meshtrain.errors import UserError
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.planning.assembly.effects import gathering_of
from meshtrain.planning.assembly.microbatches import Ways, passes_of, ways_of, with_passes
from meshtrain.planning.assembly.outline import Outline, StageOutline, outline_of, with_layers
from meshtrain.planning.assembly.processes import alike_processes
from meshtrain.planning.assembly.shorter import ShortPipeline, programs_of, short_pipelines, stages_of_ranks
from meshtrain.planning.assembly.task import Task
from meshtrain.planning.cores import on_all_cores
from meshtrain.planning.simulation.fewer_layers import LayersNeededError
from meshtrain.planning.simulation.models import layer_kinds, messages_of
from meshtrain.planning.simulation.profile import RankProfile
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.runtime.ranks import RankError

# Number of forward passes of layers that take about as long as the start of other processes.
MOST_HERE = 200


@dataclass(frozen=True)
class Processes:
    """Processes that do the same in a step.

    Attributes:
        ranks: of the processes.
        profile: what each of them does.
    """

    ranks: tuple[int, ...]
    profile: RankProfile


@dataclass(frozen=True)
class Simulation:
    """What the processes of a run do in a step.

    Attributes:
        pp_ranks: for each pp rank, its processes; the group of the first process comes first.
        first_layers: index of the first layer of each stage.
        border_bytes: (forward or backward, stage that sends) -> bytes of a message between stages.
        programs: what each pp rank computes, sends and awaits, in order.
    """

    pp_ranks: tuple[tuple[Processes, ...], ...]
    first_layers: tuple[int, ...]
    border_bytes: Mapping[tuple[str, int], int]
    programs: Sequence[Sequence[Instruction]]

    @property
    def profiles(self) -> tuple[RankProfile, ...]:
        """Return what the first process of each pp rank does."""
        return tuple(groups[0].profile for groups in self.pp_ranks)

    @property
    def groups(self) -> tuple[Processes, ...]:
        """Return the processes of all pp ranks."""
        return tuple(group for groups in self.pp_ranks for group in groups)


class _Way(NamedTuple):
    """How to simulate a run.

    Attributes:
        chosen: the pp ranks to simulate.
        likes: for each pp rank, the index of the one among them that does the same.
        short: the pipeline in which they are simulated.
    """

    chosen: list[int]
    likes: list[int]
    short: ShortPipeline


def simulate(run: SimulatedRun) -> Simulation:
    """Simulate the processes of a run.

    Those that hold the same stages, and the same part of them, are simulated once, with as few
    microbatches as the schedule allows, and with a few stages and layers of each kind. The steps of
    all processes are put together from the passes of that simulation, in the order of their
    schedule.
    """
    try:
        return _simulate(run, outline_of(run, all_layers=False))
    except LayersNeededError:
        return _simulate(run, outline_of(run, all_layers=True))


def _simulate(run: SimulatedRun, outline: Outline) -> Simulation:
    held, programs = stages_of_ranks(run), programs_of(run)
    chosen, likes, short = _shortest(run, outline, programs)
    groups = [_groups(run, outline, held[rank]) for rank in chosen]
    width, number = run.plan.mesh.world_size // run.plan.mesh.pp, num_microbatches(run.plan, run.batch)
    whole = [
        [Task(rank * width + first, run, outline.stages, held[rank]) for first, *_ in found]
        for rank, found in zip(chosen, groups, strict=True)
    ]
    simulated = _simulate_groups(short, whole)
    firsts = accumulate((len(stage.layers) for stage in outline.stages[:-1]), initial=0)
    pp_ranks = []
    same = short.like(run, likes)
    few_programs = [short.programs[rank] for rank in short.ranks]
    for rank, (like, program, stages) in enumerate(zip(likes, programs, same, strict=True)):
        ranks = [tuple(rank * width + process for process in group) for group in groups[like]]
        steps = [
            with_passes(few, few_programs[like], number, program, stages, gathering_of(run.plan))
            for few in simulated[like]
        ]
        pp_ranks.append(tuple(map(Processes, ranks, steps)))
    few = with_layers(short.run, [stage.kept for stage in short.stages])
    return Simulation(tuple(pp_ranks), tuple(firsts), _border_bytes(few, ChainMap(*same)), programs)


def _shortest(run: SimulatedRun, outline: Outline, programs: Sequence[Sequence[Instruction]]) -> _Way:
    """Return how to simulate a run with the fewest passes.

    Args:
        programs: of all pp ranks.
    """
    held, beside = stages_of_ranks(run), _layers_beside(run)
    kinds = [(_rank_kind(outline.stages, stages), *(beside[stage] for stage in stages)) for stages in held]
    wanted = [ways_of(program, gathering_of(run.plan)) for program in programs]
    places = [{stage: place for place, stage in enumerate(stages)} for stages in held]
    finer = [(kind, ways.of_stages(at)) for kind, ways, at in zip(kinds, wanted, places, strict=True)]
    # Like pp ranks may gather parameters in other passes, or split the backward passes of different
    # microbatches.
    found = [way for alike in (kinds, finer, range(len(held))) for way in _short_ways(run, outline, alike)]
    # With few microbatches, messages may not be told apart, and only the step itself shows them.
    full = found[-1]
    found.sort(key=lambda way: (way.short.num_passes, way.short.run.plan.mesh.pp))
    return next((way for way in found if _shows_all(way.short, run, way.likes, wanted)), full)


def _short_ways(run: SimulatedRun, outline: Outline, kinds: Sequence[Hashable]) -> Iterator[_Way]:
    """Yield the ways in which one pp rank of each kind is simulated."""
    # The last of them, which has the fewest microbatches at once.
    last = {kind: rank for rank, kind in enumerate(kinds)}
    chosen = sorted(last.values())
    likes = [chosen.index(last[kind]) for kind in kinds]
    alike = [range(_first_like(kinds, rank), rank + 1) for rank in chosen]
    return (_Way(chosen, likes, short) for short in short_pipelines(run, outline, alike))


def _first_like(kinds: Sequence[Hashable], rank: int) -> int:
    """Return the first of the pp ranks in a row that are of the same kind and end with one."""
    return next((it + 1 for it in range(rank - 1, -1, -1) if kinds[it] != kinds[rank]), 0)


def _border_bytes(few: SimulatedRun, likes: Mapping[int, int]) -> dict[tuple[str, int], int]:
    """Return the bytes of the messages between stages.

    Args:
        few: a run with some of the stages.
        likes: stage -> the stage that is like it there.
    """
    there, back = Counter[int](), Counter[int]()
    for message in messages_of(few):
        there[message.stage] += message.num_bytes
        back[message.stage] += message.num_bytes * message.has_gradient
    found = {(FORWARD, stage - 1): there[like] for stage, like in likes.items() if stage > 0}
    return found | {(BACKWARD, stage): back[like] for stage, like in likes.items() if stage > 0}


def _shows_all(short: ShortPipeline, run: SimulatedRun, likes: Sequence[int], wanted: Sequence[Ways]) -> bool:
    """Return whether a short pipeline shows what all passes of a run do.

    Args:
        likes: for each pp rank of the run, the index of the chosen one that does the same.
        wanted: what the passes of each pp rank of the run do.
    """
    shown = [ways_of(short.programs[rank], gathering_of(run.plan)) for rank in short.ranks]
    pairs = zip(likes, wanted, short.like(run, likes), strict=True)
    return all(ways.of_stages(stages).are_shown_by(shown[like]) for like, ways, stages in pairs)


def _rank_kind(stages: Sequence[StageOutline], held: Sequence[int]) -> tuple[Hashable, ...]:
    """Return a value that is equal for pp ranks that compute and send the same."""
    return tuple((stages[stage].kind, stage + 1 in held) for stage in held)


def _layers_beside(run: SimulatedRun) -> list[tuple[Hashable, ...]]:
    """Return the kinds of the teacher's layers in each stage; none without a teacher."""
    if run.teacher is None:
        return [()] * len(run.plan.pipeline.layer_counts)
    kinds = layer_kinds(run.teacher.build_model())
    return [kinds[first:end] for first, end in pairwise(accumulate(run.teacher.plan.pipeline.layer_counts, initial=0))]


def _groups(run: SimulatedRun, outline: Outline, held: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the processes of a pp rank in groups that hold the same."""
    shapes = frozenset().union(*(outline.stages[stage].shapes for stage in held))
    return alike_processes(run.plan.mesh, shapes, outline.heads)


def _simulate_groups(short: ShortPipeline, whole: Sequence[Sequence[Task]]) -> list[list[RankProfile]]:
    """Simulate one process of each group.

    Args:
        short: the pipeline in which they are simulated.
        whole: for each of its chosen pp ranks, these processes in the full pipeline.
    """
    plan = short.run.plan
    width = plan.mesh.world_size // plan.mesh.pp
    tasks = [
        Task(rank * width + task.rank % width, short.run, short.stages, short.held[rank], left_out, task)
        for rank, left_out, of_rank in zip(short.ranks, short.left_out, whole, strict=True)
        for task in of_rank
    ]
    profiles = _simulate_all(tasks)
    for task, profile in zip(tasks, profiles, strict=True):
        rank = task.rank // width
        wanted = passes_of(short.programs[rank])
        if [*profile.passes] != wanted:
            raise RuntimeError(f"torch runs {[*profile.passes]} on pp rank {rank}, and not {wanted}")
    found = iter(profiles)
    return [[next(found) for _ in of_rank] for of_rank in whole]


def _simulate_all(tasks: Sequence[Task]) -> list[RankProfile]:
    """Simulate some processes: here, or on all cores of this machine if there is much to do."""
    may_start = not current_process().daemon and len(tasks) > 1
    if not dist.is_initialized() and not (may_start and sum(task.num_layer_passes for task in tasks) > MOST_HERE):
        return [task.simulate() for task in tasks]
    try:
        return on_all_cores(Task.simulate, tasks)
    except RankError as error:
        if isinstance(error.original, UserError | LayersNeededError):
            raise error.original from None
        raise error from None
