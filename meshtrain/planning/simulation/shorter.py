"""A pipeline with those pp ranks alone that differ from each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshtrain.compat.schedules import BACKWARD, FORWARD, Pass, pass_orders
from meshtrain.config.schedules import SCHEDULES
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.schedule import stage_owners
from meshtrain.planning.simulation.outline import Outline, StageOutline
from meshtrain.planning.simulation.rank import SimulatedRun

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

    @property
    def orders(self) -> list[list[Pass]]:
        """Return the passes of each pp rank."""
        return pass_orders_of(self.run)


def shorten(run: SimulatedRun, outline: Outline, chosen: Sequence[int]) -> ShortPipeline:
    """Return a pipeline of the chosen pp ranks if that is possible, with few microbatches.

    Args:
        run: whose plan is resolved.
        outline: of the run.
        chosen: the pp ranks that differ from each other, ascending.
    """
    held = stages_of_ranks(run)
    kept = sorted(stage for rank in chosen for stage in held[rank])
    stages = tuple(outline.stages[stage] for stage in kept)
    mesh = run.plan.mesh.model_copy(update={"pp": len(chosen)})
    short = replace(run, plan=run.plan.model_copy(update={"mesh": mesh}))
    alone = [tuple(kept[stage] for stage in stages) for stages in stages_of_ranks(short)]
    is_alike = outline.is_stream and alone == [held[rank] for rank in chosen] and _keeps_patterns(run, stages)
    if not is_alike:
        return ShortPipeline(_with_fewest(run, run), outline.stages, tuple(chosen))
    return ShortPipeline(_with_fewest(short, run), stages, tuple(range(len(chosen))))


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


def _with_fewest(short: SimulatedRun, run: SimulatedRun) -> SimulatedRun:
    """Return a run with as few microbatches as show what those of another one do."""
    number = min(num_microbatches(run.plan, run.batch), _fewest_microbatches(short))
    size = number * run.batch.micro_batch_size * run.plan.mesh.data_degree
    return replace(short, batch=replace(run.batch, global_batch_size=size))


def _fewest_microbatches(run: SimulatedRun) -> int:
    """Return how many microbatches show what any number does."""
    name, pp = run.plan.pipeline.schedule, run.plan.mesh.pp
    if name == "DualPipeV":
        # It splits the backward passes of some microbatches only.
        return num_microbatches(run.plan, run.batch)
    num_stages = pp * run.plan.pipeline.stages_per_rank
    if num_stages == 1:
        return FEWEST_ALONE
    match SCHEDULES[name].microbatches:
        case "one per stage":
            return max(num_stages, FEWEST)
        case "equal rounds":
            return pp * math.ceil(FEWEST / pp)
        case "any number":
            return FEWEST
