"""A pipeline with those pp ranks alone that differ from each other."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshtrain.compat.schedules import BACKWARD, FORWARD, Pass, pass_orders
from meshtrain.config.schedules import SCHEDULES, in_equal_rounds
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.schedule import stage_owners
from meshtrain.planning.assembly.outline import Outline, StageOutline
from meshtrain.planning.simulation.run import SimulatedRun

# A few first microbatches, the last ones, and one between them. Without a pipeline the first and
# the last alone differ from the others.
FEWEST, FEWEST_ALONE = 6, 3


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
    def orders(self) -> list[list[Pass]]:
        """Return the passes of each pp rank."""
        return pass_orders_of(self.run)


def short_pipelines(run: SimulatedRun, outline: Outline, chosen: Sequence[int]) -> Iterator[ShortPipeline]:
    """Yield pipelines in which a simulation of some pp ranks may take place.

    The last one has all pp ranks and microbatches of the run.

    Args:
        run: whose plan is resolved.
        outline: of the run.
        chosen: the pp ranks that differ from each other, ascending.
    """
    alone = _chosen_alone(run, outline, chosen)
    if alone is not None:
        yield _shortened(alone, run, 1)
        yield _shortened(alone, run, 2)
    full = ShortPipeline(run, outline.stages, tuple(chosen))
    times = 1
    while (found := _shortened(full, run, times)).run.batch != run.batch:
        yield found
        times *= 2
    yield full


def _chosen_alone(run: SimulatedRun, outline: Outline, chosen: Sequence[int]) -> ShortPipeline | None:
    """Return a pipeline of the chosen pp ranks alone, if they then do the same."""
    if run.teacher is not None:
        # It has as many stages.
        return None
    held = stages_of_ranks(run)
    kept = sorted(stage for rank in chosen for stage in held[rank])
    stages = tuple(outline.stages[stage] for stage in kept)
    mesh = run.plan.mesh.model_copy(update={"pp": len(chosen)})
    short = replace(run, plan=run.plan.model_copy(update={"mesh": mesh}))
    alone = [tuple(kept[stage] for stage in stages) for stages in stages_of_ranks(short)]
    is_alike = outline.is_stream and alone == [held[rank] for rank in chosen] and _keeps_patterns(run, stages)
    return ShortPipeline(short, stages, tuple(range(len(chosen)))) if is_alike else None


def stages_of_ranks(run: SimulatedRun) -> list[tuple[int, ...]]:
    """Return the stages of each pp rank."""
    pp = run.plan.mesh.pp
    owners = stage_owners(run.plan.pipeline, pp)
    return [tuple(stage for stage, owner in enumerate(owners) if owner == rank) for rank in range(pp)]


def pass_orders_of(run: SimulatedRun) -> list[list[Pass]]:
    """Return the passes of each pp rank, in order."""
    number, owners = num_microbatches(run.plan, run.batch), stage_owners(run.plan.pipeline, run.plan.mesh.pp)
    if len(owners) == 1:
        return [[Pass(phase, 0, microbatch) for microbatch in range(number) for phase in (FORWARD, BACKWARD)]]
    return pass_orders(run.plan.pipeline.schedule, owners, number)


def _keeps_patterns(run: SimulatedRun, stages: Sequence[StageOutline]) -> bool:
    """Return whether the same layers recompute if only some stages exist."""
    layers = [layer for stage in stages for layer in stage.layers]
    return all((layer - position) % run.plan.recompute.every == 0 for position, layer in enumerate(layers))


def _shortened(short: ShortPipeline, run: SimulatedRun, times: int) -> ShortPipeline:
    """Return a pipeline with the fewest microbatches that may show what those of a run do.

    Args:
        short: the pipeline.
        run: the full one.
        times: how often the fewest.
    """
    number = min(num_microbatches(run.plan, run.batch), times * _fewest_microbatches(short.run))
    if SCHEDULES[run.plan.pipeline.schedule].microbatches == "equal rounds":
        number = in_equal_rounds(number, short.run.plan.mesh.pp)
    size = number * run.batch.micro_batch_size * run.plan.mesh.data_degree
    return replace(short, run=replace(short.run, batch=replace(run.batch, global_batch_size=size)))


def _fewest_microbatches(run: SimulatedRun) -> int:
    pp = run.plan.mesh.pp
    num_stages = pp * run.plan.pipeline.stages_per_rank
    if num_stages == 1:
        return FEWEST_ALONE
    match SCHEDULES[run.plan.pipeline.schedule].microbatches:
        case "one per stage":
            return max(num_stages, FEWEST)
        case "equal rounds":
            return pp * math.ceil(FEWEST / pp)
        case "any number":
            return FEWEST
