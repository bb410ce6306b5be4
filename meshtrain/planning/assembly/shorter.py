"""A pipeline with those pp ranks and stages alone that differ from each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from meshtrain.compat.schedules import BACKWARD, FORWARD, Instruction, Pass, instructions
from meshtrain.config.schedules import SCHEDULES, in_equal_rounds
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.schedule import stage_owners
from meshtrain.planning.assembly.effects import gathering_of
from meshtrain.planning.assembly.outline import Outline, StageOutline
from meshtrain.planning.simulation.run import SimulatedRun

# The first microbatch, the last one, and one between them.
FEWEST = 3
# Number of microbatches, relative to the fewest, that the differing pp ranks alone are tried with.
# Some schedules need more to show all that passes do.
MOST = 4
# Most pp ranks in a row that do the same. One that another follows has more microbatches at once.
MOST_ALIKE = 2


@dataclass(frozen=True)
class ShortPipeline:
    """A pipeline in which a simulation takes place.

    Attributes:
        run: with its plan and its number of microbatches.
        stages: of the pipeline.
        ranks: for each chosen pp rank, the one that it is here.
        places: for each chosen pp rank and each stage that it holds in the full run, the place of a
            like one among those that it holds here.
        left_out: for each chosen pp rank, the stages of the full run that it does not hold here,
            each with the index of a like one that it does hold.
    """

    run: SimulatedRun
    stages: tuple[StageOutline, ...]
    ranks: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    left_out: tuple[tuple[tuple[int, StageOutline], ...], ...]

    @property
    def held(self) -> list[tuple[int, ...]]:
        """Return the stages of each pp rank."""
        return stages_of_ranks(self.run)

    def like(self, run: SimulatedRun, likes: Sequence[int]) -> list[dict[int, int]]:
        """Return for each pp rank of a run: its stage -> the stage that is like it here.

        Args:
            run: the full one.
            likes: for each pp rank, the index of the chosen one that does the same.
        """
        held = self.held
        return [
            {stage: held[self.ranks[like]][place] for stage, place in zip(stages, self.places[like], strict=True)}
            for stages, like in zip(stages_of_ranks(run), likes, strict=True)
        ]

    @property
    def num_passes(self) -> int:
        """Return how many microbatches go through stages in all simulations together."""
        return sum(len(self.held[rank]) for rank in self.ranks) * num_microbatches(self.run.plan, self.run.batch)

    @property
    def programs(self) -> list[list[Instruction]]:
        """Return what each pp rank does, in order."""
        return programs_of(self.run)


def short_pipelines(run: SimulatedRun, outline: Outline, alike: Sequence[range]) -> Iterator[ShortPipeline]:
    """Yield pipelines in which a simulation of some pp ranks may take place.

    The last one has all pp ranks and microbatches of the run.

    Args:
        run: whose plan is resolved.
        outline: of the run.
        alike: for each chosen pp rank, in ascending order, those in a row that do the same and end
            with it.
    """
    for most in range(1, min(MOST_ALIKE, max(map(len, alike))) + 1):
        few = [ranks[-most:] for ranks in alike]
        kept, simulated = sorted(chain(*few)), [ranks[0] for ranks in few]
        for places in _places(run, outline, simulated):
            alone = _alone(run, outline, kept, simulated, places)
            if alone is not None:
                fewest = _fewest_microbatches(alone.run)
                yield from (_shortened(alone, run, number) for number in range(fewest, MOST * fewest + 1))
    every = tuple(range(run.plan.pipeline.stages_per_rank))
    chosen = tuple(ranks[-1] for ranks in alike)
    full = ShortPipeline(run, outline.stages, chosen, (every,) * len(chosen), ((),) * len(chosen))
    number = _fewest_microbatches(run)
    while (found := _shortened(full, run, number)).run.batch != run.batch:
        yield found
        number *= 2
    yield full


def _places(run: SimulatedRun, outline: Outline, simulated: Sequence[int]) -> list[list[int]]:
    """Return which of the stages of a process a pipeline may have, by their places: a few, or all.

    Args:
        run: the full one.
        outline: of the run.
        simulated: the pp ranks that are simulated.
    """
    every = list(range(run.plan.pipeline.stages_per_rank))
    if gathering_of(run.plan).in_passes or not outline.borders_are_alike:
        return [every]
    found = {every[0], every[-1]}
    for stages in map(stages_of_ranks(run).__getitem__, simulated):
        for place in every:
            if all(outline.stages[stages[it]].kind != outline.stages[stages[place]].kind for it in found):
                found.add(place)
    return [sorted(found), every] if len(found) < len(every) else [every]


def _alone(
    run: SimulatedRun, outline: Outline, kept: Sequence[int], simulated: Sequence[int], places: Sequence[int]
) -> ShortPipeline | None:
    """Return a pipeline of some pp ranks and stages alone, if they then do the same.

    Args:
        kept: the pp ranks, ascending.
        simulated: those of them that are simulated.
        places: of the stages of each process, ascending.
    """
    if run.teacher is not None:
        # It has as many stages.
        return None
    full = stages_of_ranks(run)
    held = [tuple(full[rank][place] for place in places) for rank in kept]
    here = sorted(stage for of_rank in held for stage in of_rank)
    stages = tuple(outline.stages[stage] for stage in here)
    mesh = run.plan.mesh.model_copy(update={"pp": len(kept)})
    pipeline = run.plan.pipeline.model_copy(update={"stages_per_rank": len(places)})
    short = replace(run, plan=run.plan.model_copy(update={"mesh": mesh, "pipeline": pipeline}))
    alone = [tuple(here[stage] for stage in of_rank) for of_rank in stages_of_ranks(short)]
    if not (outline.is_stream and alone == held and _keeps_patterns(run, stages)):
        return None
    ranks = tuple(map(kept.index, simulated))
    likes, left_out = [], []
    for rank, here_held in zip(simulated, map(stages_of_ranks(short).__getitem__, ranks), strict=True):
        own = [outline.stages[stage] for stage in full[rank]]
        like = _likes(own, places)
        likes.append(like)
        left_out.append(tuple((here_held[like[it]], own[it]) for it in range(len(own)) if it not in places))
    return ShortPipeline(short, stages, ranks, tuple(likes), tuple(left_out))


def _likes(stages: Sequence[StageOutline], places: Sequence[int]) -> tuple[int, ...]:
    """Return for each stage of a process which of those with some places is like it."""
    kinds = [stages[place].kind for place in places]
    own = {place: index for index, place in enumerate(places)}
    return tuple(own[place] if place in own else kinds.index(it.kind) for place, it in enumerate(stages))


def stages_of_ranks(run: SimulatedRun) -> list[tuple[int, ...]]:
    """Return the stages of each pp rank."""
    pp = run.plan.mesh.pp
    owners = stage_owners(run.plan.pipeline, pp)
    return [tuple(stage for stage, owner in enumerate(owners) if owner == rank) for rank in range(pp)]


def programs_of(run: SimulatedRun) -> list[list[Instruction]]:
    """Return what each pp rank does, in order."""
    number, owners = num_microbatches(run.plan, run.batch), stage_owners(run.plan.pipeline, run.plan.mesh.pp)
    if len(owners) > 1:
        return instructions(run.plan.pipeline.schedule, owners, number)
    passes = [Pass(phase, 0, microbatch) for microbatch in range(number) for phase in (FORWARD, BACKWARD)]
    return [[Instruction("compute", it) for it in passes]]


def _keeps_patterns(run: SimulatedRun, stages: Sequence[StageOutline]) -> bool:
    """Return whether the same layers recompute if only some stages exist."""
    layers = [layer for stage in stages for layer in stage.layers]
    return all((layer - position) % run.plan.recompute.every == 0 for position, layer in enumerate(layers))


def _shortened(short: ShortPipeline, run: SimulatedRun, number: int) -> ShortPipeline:
    """Return a pipeline with fewer microbatches.

    Args:
        short: the pipeline.
        run: the full one.
        number: of microbatches. There are at most as many, and less if the schedule needs it.
    """
    number = min(num_microbatches(run.plan, run.batch), number)
    if SCHEDULES[run.plan.pipeline.schedule].microbatches == "equal rounds":
        number = in_equal_rounds(number, short.run.plan.mesh.pp)
    size = number * run.batch.micro_batch_size * run.plan.mesh.data_degree
    return replace(short, run=replace(short.run, batch=replace(run.batch, global_batch_size=size)))


def _fewest_microbatches(run: SimulatedRun) -> int:
    pp = run.plan.mesh.pp
    match SCHEDULES[run.plan.pipeline.schedule].microbatches:
        case "one per stage":
            return max(pp * run.plan.pipeline.stages_per_rank, FEWEST)
        case "equal rounds":
            return max(pp, FEWEST)
        case "any number":
            return FEWEST
