"""The steps of processes with several stages, put together from stages that are simulated alone.

Each kind of stage is simulated once, in a pipeline with one stage on each pp rank. That takes a
part of the time of a pipeline whose processes have several stages.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.planning.assembly.expansion import with_layers_in_passes, with_state
from meshtrain.planning.assembly.growth import Outside, outside_of
from meshtrain.planning.assembly.outline import Outline, StageOutline, with_layers
from meshtrain.planning.assembly.shorter import with_fewest
from meshtrain.planning.simulation.profile import RankProfile
from meshtrain.planning.simulation.rank import simulate_rank, simulate_without_passes
from meshtrain.planning.simulation.recorder import Work
from meshtrain.planning.simulation.run import SimulatedRun

# The schedule with several stages whose stages do what those of 1F1B do. LoopedBFS awaits more
# messages at once, and others split backward passes.
SCHEDULE = "Interleaved1F1B"


@dataclass(frozen=True)
class StageTask:
    """The simulation of one stage.

    Attributes:
        rank: of a process that has it.
        few: the run, with a few layers.
        more: the same with one more layer in the stage.
        num_layers: of the stage in `few`.
    """

    rank: int
    few: SimulatedRun
    more: SimulatedRun
    num_layers: int

    @property
    def num_layer_passes(self) -> int:
        """Return how many forward passes through single layers are simulated."""
        return num_microbatches(self.few.plan, self.few.batch) * self.num_layers

    def simulate(self) -> "SimulatedStage":
        """Return what the process does in a step."""
        more = outside_of(simulate_without_passes(self.more, self.rank))
        return SimulatedStage(simulate_rank(self.few, self.rank), more, self.num_layers)


@dataclass(frozen=True)
class SimulatedStage:
    """What a process with one stage does in a step.

    Attributes:
        few: with a few layers.
        more: outside the passes, with one more layer.
        num_layers: number of the few.
    """

    few: RankProfile
    more: Outside
    num_layers: int

    def outside(self, num_layers: int) -> Outside:
        """Return what a process with more layers does outside the passes.

        Raises:
            UnevenGrowthError: if it is not clear what a layer adds.
        """
        return outside_of(self.few).with_more_layers(self.more, num_layers - self.num_layers)


@dataclass(frozen=True)
class Chain:
    """A pipeline of one stage of each kind.

    Attributes:
        run: with a few layers and microbatches, and one stage on each pp rank.
        tasks: the simulations of its stages.
        likes: for each stage of the full run, the index of the one that is like it.
    """

    run: SimulatedRun
    tasks: tuple[StageTask, ...]
    likes: tuple[int, ...]


def chain_of(run: SimulatedRun, outline: Outline) -> Chain | None:
    """Return the chain of a run; None if its stages must be simulated together, or one layer alone.

    Args:
        run: whose plan is resolved.
        outline: of the run.
    """
    plan, stages = run.plan, outline.stages
    # What is gathered in a pass then depends on the pass of the stage before it.
    frees = plan.mesh.is_sharded and plan.shard.reshard_after_forward == "always"
    kinds = {kind for stage in stages for kind in stage.layer_kinds}
    if plan.pipeline.schedule != SCHEDULE or frees or len(kinds) > 1 or not outline.is_stream:
        return None
    chosen = {stage.kind: stage for stage in stages}
    numbers = [len(stage.kept) for stage in chosen.values()]
    if sum(numbers) == sum(len(stage.layers) for stage in stages):
        return None
    mesh = plan.mesh.model_copy(update={"pp": len(chosen)})
    pipeline = plan.pipeline.model_copy(update={"schedule": "1F1B", "stages_per_rank": 1})
    alone = replace(run, plan=plan.model_copy(update={"mesh": mesh, "pipeline": pipeline}), granularity=1)
    alone = with_fewest(alone, run)
    width = plan.mesh.world_size // plan.mesh.pp
    few = _with_numbers(alone, numbers)
    tasks = tuple(
        StageTask(index * width, few, _with_numbers(alone, _one_more(numbers, index)), number)
        for index, number in enumerate(numbers)
    )
    indices = {kind: index for index, kind in enumerate(chosen)}
    return Chain(few, tasks, tuple(indices[stage.kind] for stage in stages))


def _one_more(numbers: Sequence[int], index: int) -> list[int]:
    return [number + (position == index) for position, number in enumerate(numbers)]


def _with_numbers(run: SimulatedRun, numbers: Sequence[int]) -> SimulatedRun:
    """Return a run with some layers in each stage; any will do, because all are of one kind."""
    layers = iter(range(sum(numbers)))
    return with_layers(run, [[next(layers) for _ in range(number)] for number in numbers])


def profile_in_chain(
    chain: Chain, simulated: Sequence[SimulatedStage], stages: Sequence[StageOutline], held: Sequence[int]
) -> RankProfile:
    """Return the step of a process with few microbatches, and with all layers of its stages.

    Args:
        chain: of the run.
        simulated: stages of the chain.
        stages: of the full run.
        held: indices of the stages of the process.

    Raises:
        UnevenGrowthError: if it is not clear what a layer adds outside of passes.
    """
    # The parameters outside of layers are in the first and in the last stage.
    last = len(stages) - 1
    special = next((stage for stage in held if stage in (0, last)), held[0])
    own = simulated[chain.likes[special]]
    outside = own.outside(sum(len(stages[stage].layers) for stage in held))
    before, _, _ = own.few.parts()
    actions = [with_state(before[0], outside.state), *before[1:]]
    messages = Counter[Work]()
    for stage in held:
        few = simulated[chain.likes[stage]].few
        messages += few.between_stages
        for at, found in few.parts()[1].items():
            expanded = with_layers_in_passes(found, stages[stage].likes)
            actions += [action.of_pass(stage, at.microbatch) for action in expanded]
    return RankProfile((*actions, *outside.behind), own.few.num_microbatches, messages)
