"""The simulation of one process, with a few of its layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.planning.assembly.expansion import with_all_layers
from meshtrain.planning.assembly.growth import Outside, UnevenGrowthError, outside_of
from meshtrain.planning.assembly.outline import StageOutline, with_layers
from meshtrain.planning.simulation.profile import RankProfile
from meshtrain.planning.simulation.rank import simulate_rank, simulate_with_one_less, simulate_without_passes
from meshtrain.planning.simulation.run import SimulatedRun


@dataclass(frozen=True)
class Task:
    """The simulation of one process.

    Attributes:
        rank: of the process.
        run: whose plan is for these stages.
        stages: of the pipeline, which may be some of those of the model.
        held: indices of the stages of the process.
        others: stages of the process that this pipeline does not have, each with the index of a
            like one that is held.
        whole: the same process in the full pipeline; None if it is in that.
    """

    rank: int
    run: SimulatedRun
    stages: tuple[StageOutline, ...]
    held: tuple[int, ...]
    others: tuple[tuple[int, StageOutline], ...] = ()
    whole: "Task | None" = None

    @property
    def num_layer_passes(self) -> int:
        """Return how many forward passes through single layers are simulated."""
        teacher = self.run.teacher
        beside = [] if teacher is None else [teacher.plan.pipeline.layer_counts[it] for it in self.held]
        kept = sum(len(self.stages[it].kept) for it in self.held)
        return num_microbatches(self.run.plan, self.run.batch) * (kept + sum(beside))

    def simulate(self) -> RankProfile:
        """Return what the process does in a step.

        Raises:
            LayersNeededError: if it is not known what a single layer does.
        """
        if not self.others and not any(stage.left_out for stage in self.stages):
            return simulate_rank(with_layers(self.run, [stage.layers for stage in self.stages]), self.rank)
        # The size of some memory grows with the number of layers, so it is rounded at the end.
        few, outside = self._with_outside()
        return with_all_layers(few, outside, self._likes()).rounded(self.run.granularity)

    def simulate_passes(self) -> RankProfile:
        """Return what the process does in the passes of a step; outside of them a few layers count.

        Raises:
            LayersNeededError: if it is not known what a single layer does.
        """
        few = simulate_rank(self._with({}), self.rank)
        return with_all_layers(few, outside_of(few), self._likes()).rounded(self.run.granularity)

    def _likes(self) -> dict[int, Sequence[int]]:
        # Without a layer left out, each one is simulated itself.
        held = {it: self.stages[it] for it in self.held}
        return {it: stage.likes if stage.left_out else range(len(stage.layers)) for it, stage in held.items()}

    def _with_outside(self) -> tuple[RankProfile, Outside]:
        """Return a step with a few layers, and what one with all layers does outside the passes."""
        few, left_out = self._with({}), self._left_out()
        if not left_out:
            profile = simulate_rank(few, self.rank)
            return profile, outside_of(profile)
        kinds = {stage.parameters_of(layer) for _, stage, layer in left_out}
        # Matrices that are updated as a whole are divided among processes, and not each layer.
        if len(kinds) > 1 or self.run.optimizer.takes_whole_matrices:
            return simulate_rank(few, self.rank), self._with_all_parameters()
        like, stage, layer = left_out[0]
        found = simulate_with_one_less(few, self.rank, like, stage.like(layer))
        try:
            outside = outside_of(found.less).with_more_layers(outside_of(found.full), len(left_out) + 1)
        except UnevenGrowthError:
            return found.full, self._with_all_parameters()
        buffers = [size for like, _ in self.others for size in found.buffers_outside_layers[like]]
        return found.full, outside.with_buffers(buffers)

    def _with_all_parameters(self) -> Outside:
        """Return the same from a step with all layers, but without passes."""
        if self.others:
            assert self.whole is not None, "nobody knows the stages that are left out"
            return self.whole._with_all_parameters()
        run = self._with({stage: self.stages[stage].layers for stage in self.held})
        return outside_of(simulate_without_passes(run, self.rank))

    def _left_out(self) -> list[tuple[int, StageOutline, int]]:
        """Return the layers that are left out: a stage that is held, one like it, and its layer."""
        held = [(it, self.stages[it], layer) for it in self.held for layer in self.stages[it].left_out]
        return held + [(like, stage, layer) for like, stage in self.others for layer in stage.layers]

    def _with(self, layers: dict[int, Sequence[int]]) -> SimulatedRun:
        """Return the run with a few layers, or with those that are given for a stage."""
        chosen = [layers.get(index, stage.kept) for index, stage in enumerate(self.stages)]
        return with_layers(replace(self.run, granularity=1), chosen)
