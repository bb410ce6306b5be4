"""A pipeline with those pp ranks alone that differ from each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshtrain.compat.schedules import BACKWARD, FORWARD, Instruction, Pass, instructions
from meshtrain.config.schedules import SCHEDULES, in_equal_rounds
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.schedule import stage_owners
from meshtrain.planning.assembly.outline import Outline, StageOutline
from meshtrain.planning.simulation.run import SimulatedRun

# The first microbatch, the last one, and one between them.
FEWEST = 3
# Number of microbatches, relative to the fewest, that the differing pp ranks alone are tried with.
# Some schedules need more to show all that passes do.
MOST = 4


@dataclass(frozen=True)
class ShortPipeline:
    """A pipeline in which a simulation takes place.

    Attributes:
        run: with its plan and its number of microbatches.
        stages: of the pipeline.
        ranks: for each chosen pp rank, the one that it is here.
    """

    run: SimulatedRun
    stages: tuple[StageOutline, ...]
    ranks: tuple[int, ...]

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
        pairs = zip(stages_of_ranks(run), likes, strict=True)
        return [dict(zip(stages, self.held[self.ranks[like]], strict=True)) for stages, like in pairs]

    @property
    def num_microbatches(self) -> int:
        """Return how many microbatches are simulated, on all chosen pp ranks together."""
        return len(self.ranks) * num_microbatches(self.run.plan, self.run.batch)

    @property
    def programs(self) -> list[list[Instruction]]:
        """Return what each pp rank does, in order."""
        return programs_of(self.run)


def short_pipelines(
    run: SimulatedRun, outline: Outline, chosen: Sequence[int], doubles: Sequence[int]
) -> Iterator[ShortPipeline]:
    """Yield pipelines in which a simulation of some pp ranks may take place.

    The last one has all pp ranks and microbatches of the run.

    Args:
        run: whose plan is resolved.
        outline: of the run.
        chosen: the pp ranks that differ from each other, ascending.
        doubles: for each of them, another pp rank that is like it, or itself if there is none.
    """
    # A pp rank that another one like it follows has more microbatches at once.
    for kept in (chosen, sorted({*chosen, *doubles})):
        alone = _alone(run, outline, kept, chosen if kept is chosen else doubles)
        if alone is not None:
            fewest = _fewest_microbatches(alone.run)
            yield from (_shortened(alone, run, number) for number in range(fewest, MOST * fewest + 1))
    full = ShortPipeline(run, outline.stages, tuple(chosen))
    number = _fewest_microbatches(run)
    while (found := _shortened(full, run, number)).run.batch != run.batch:
        yield found
        number *= 2
    yield full


def _alone(run: SimulatedRun, outline: Outline, kept: Sequence[int], simulated: Sequence[int]) -> ShortPipeline | None:
    """Return a pipeline of some pp ranks alone, if they then do the same.

    Args:
        kept: the pp ranks, ascending.
        simulated: those of them that are simulated.
    """
    if run.teacher is not None:
        # It has as many stages.
        return None
    held = stages_of_ranks(run)
    here = sorted(stage for rank in kept for stage in held[rank])
    stages = tuple(outline.stages[stage] for stage in here)
    mesh = run.plan.mesh.model_copy(update={"pp": len(kept)})
    short = replace(run, plan=run.plan.model_copy(update={"mesh": mesh}))
    alone = [tuple(here[stage] for stage in stages) for stages in stages_of_ranks(short)]
    is_alike = outline.is_stream and alone == [held[rank] for rank in kept] and _keeps_patterns(run, stages)
    return ShortPipeline(short, stages, tuple(map(kept.index, simulated))) if is_alike else None


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
