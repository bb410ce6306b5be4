"""The best candidates, simulated."""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from meshtrain.config.plan import ParallelPlan, TensorPlan
from meshtrain.config.run import RunConfig
from meshtrain.config.schedules import SCHEDULES
from meshtrain.data.tokens.workers import num_cores
from meshtrain.errors import UserError
from meshtrain.models.flops import flops_of_layers
from meshtrain.parallel.account import flops_around_layers
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.planning.machine import Machine
from meshtrain.planning.memory import MemoryUse
from meshtrain.planning.needs import find_needs, simulated_run
from meshtrain.planning.search.candidates import Candidate, Kind
from meshtrain.planning.search.estimate import Estimate, Estimator, ModelSizes
from meshtrain.planning.search.layers import LayerNeeds, layer_needs
from meshtrain.planning.simulation.pipeline import simulate
from meshtrain.planning.simulation.rank import SimulatedRun
from meshtrain.planning.speed.step_time import StepTime
from meshtrain.runtime.ranks import program_hidden, run_on_ranks
from meshtrain.training.resolve import ResolvedRun

Result = TypeVar("Result")
# Candidates that are simulated, of these with one mesh or a separate backward pass, and how long
# it may take.
SIMULATED, FEW, MOST_SPLIT, SECONDS = 20, 4, 4, 3600.0
# An estimate may be this far off, and the candidate is still simulated.
MARGIN = 1.1


@dataclass(frozen=True)
class Found:
    """A simulated candidate.

    Attributes:
        candidate: its settings.
        use: the memory of its fullest process.
        time: of its step.
        fits: whether it fits the machine.
    """

    candidate: Candidate
    use: MemoryUse
    time: StepTime
    fits: bool


@dataclass(frozen=True)
class Wanted:
    """A run whose plan is searched.

    Attributes:
        config: of the run, without a plan that is fixed.
        base: the run, resolved for one process.
        machine: on which it will run.
        world_size: number of processes.
        tensors: tp and sequence parallel -> the tensor rules, once they are known.
    """

    config: RunConfig
    base: ResolvedRun
    machine: Machine
    world_size: int
    tensors: dict[tuple[int, bool], TensorPlan] = field(default_factory=dict)

    def resolved(self, candidate: Candidate) -> ResolvedRun:
        """Return the run with the plan of a candidate.

        Raises:
            UserError: if the plan contradicts the model or the batches.
        """
        plan = candidate.plan(self.config.plan)
        rows = candidate.micro_batch_size
        config = self.config.model_copy(update={"plan": plan, "micro_batch_size": rows})
        batch = self.config.global_batch_size
        return self._with(config, candidate.plan(self.base.plan), batch, self.world_size, candidate.kind)

    def of_layers(self, tp: int, sequence_parallel: bool, recompute: str) -> SimulatedRun:
        """Return a step of two microbatches of one sequence on one stage, to look at its layers.

        Raises:
            UserError: if the model refuses such a plan.
        """
        plan = self.base.plan
        plan = plan.model_copy(
            update={
                "mesh": plan.mesh.model_copy(update={"tp": tp}),
                "tensor": plan.tensor.model_copy(update={"sequence_parallel": sequence_parallel}),
                "recompute": plan.recompute.model_copy(update={"mode": recompute}),
            }
        )
        config = self.config.model_copy(update={"plan": plan, "micro_batch_size": 1, "global_batch_size": 2})
        kind = tp, sequence_parallel, recompute
        resolved = self._with(config, plan, 2, tp, kind)
        self.tensors[kind[:2]] = resolved.plan.tensor
        return simulated_run(resolved, on_gpus=not self.machine.is_cpu, granularity=self.machine.granularity)

    def _with(
        self, config: RunConfig, plan: ParallelPlan, global_batch_size: int, world_size: int, kind: Kind
    ) -> ResolvedRun:
        length = self.base.batch.sequence_length
        batch = BatchShape(global_batch_size, config.micro_batch_size, length, self.base.batch.width_multiple)
        plan = resolve_plan(plan, self.base.model, batch, world_size, known_tensor=self.tensors.get(kind[:2]))
        return replace(self.base, config=config, plan=plan, batch=batch)


def model_sizes(base: ResolvedRun) -> ModelSizes:
    """Return the sizes of a model."""
    name, layers = find_layers(base.model)
    before, after = flops_around_layers(base.model)
    first, *others = flops_of_layers(layers, base.model.config, base.batch.sequence_length)
    around = [0, 0]
    head = {id(parameter) for parameter in base.model.get_output_embeddings().parameters()}
    for parameter_name, parameter in base.model.named_parameters(remove_duplicate=False):
        if not parameter_name.startswith(f"{name}."):
            around[id(parameter) in head and "embed" not in parameter_name] += parameter.numel()
    return ModelSizes(
        tuple(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers),
        (around[0], around[1]),
        (before + first, *others),
        after,
    )


def build_estimator(wanted: Wanted, kinds: Sequence[Kind]) -> Estimator:
    """Return an estimator that knows the layers of some kinds of candidates.

    Args:
        wanted: the run.
        kinds: tp, sequence parallel and recomputation. Those that the model refuses are left out.
            Without sequence parallelism more memory is needed for the same seconds, so that is left
            out where the model allows it.
    """
    runs: dict[Kind, SimulatedRun] = {}
    for kind in sorted(kinds, key=lambda kind: not kind[1]):
        if (kind[0], True, kind[2]) in runs:
            continue
        try:
            runs[kind] = wanted.of_layers(*kind)
        except UserError:
            # Such a plan contradicts the model.
            continue
    sizes, speed = model_sizes(wanted.base), wanted.machine.config.speed
    assert speed is not None
    found = _on_all_cores(_layer_needs, list(runs.values()), len(sizes.layers))
    needs: dict[Kind, LayerNeeds] = dict(zip(runs, found, strict=True))
    return Estimator(wanted.base.plan, wanted.config.global_batch_size, sizes, needs, speed)


def kinds_of(found: Sequence[Candidate]) -> list[Kind]:
    """Return tp, sequence parallel and recomputation of all candidates, each once."""
    return sorted({it.kind for it in found})


def promising(estimates: Mapping[Candidate, Estimate], limit_bytes: float) -> list[Candidate]:
    """Return the fastest candidates that should fit, and then those that may fit.

    There are not too many of one mesh, nor of schedules with separate weight gradients: all layers
    of their stages are simulated, which takes long. These come last.
    """
    fitting = [it for it, estimate in estimates.items() if estimate.peak_bytes <= limit_bytes * MARGIN]
    chosen: list[Candidate] = []
    kinds: Counter[object] = Counter()
    for candidate in sorted(fitting, key=lambda it: (estimates[it].peak_bytes > limit_bytes, estimates[it].seconds)):
        is_split = candidate.pp > 1 and SCHEDULES[candidate.schedule].splits_backward
        if len(chosen) < SIMULATED and kinds[candidate.mesh] < FEW and not (is_split and kinds["split"] == MOST_SPLIT):
            chosen.append(candidate)
            kinds.update([candidate.mesh, *(["split"] if is_split else [])])
    return sorted(chosen, key=lambda it: it.pp > 1 and SCHEDULES[it.schedule].splits_backward)


def simulate_all(wanted: Wanted, candidates: Sequence[Candidate], deadline: float) -> list[Found]:
    """Simulate candidates, and return them from the fastest to the slowest.

    Args:
        wanted: the run.
        candidates: the most promising ones first.
        deadline: on the monotonic clock, after which no further one is begun.
    """
    found = _on_all_cores(_simulated, candidates, wanted, deadline=deadline)
    return sorted((it for it in found if it is not None), key=lambda it: it.time.seconds)


def _layer_needs(run: SimulatedRun, num_layers: int) -> LayerNeeds:
    return layer_needs(simulate(run).profiles[0], num_layers)


def _simulated(candidate: Candidate, wanted: Wanted) -> Found | None:
    """Return a simulated candidate; None if it contradicts the run."""
    try:
        resolved = wanted.resolved(candidate)
    except UserError:
        return None
    needs = find_needs(resolved, wanted.machine)
    use = max(needs.uses, key=lambda use: use.peak_bytes)
    assert needs.time is not None
    fits = wanted.machine.with_fragmentation(use.peak_bytes) <= wanted.machine.memory_bytes
    return Found(candidate, use, needs.time, fits)


def _on_all_cores(
    compute: Callable[..., Result], values: Sequence[Any], *args: Any, deadline: float = math.inf
) -> list[Result]:
    """Return `compute(value, *args)` for each value, computed on all cores of this machine.

    Args:
        compute: a module-level function.
        values: for which it is called.
        args: further arguments of it.
        deadline: on the monotonic clock, after which no process begins a second value.
    """
    if not values:
        return []
    workers = min(len(values), num_cores())
    with program_hidden():
        shares = run_on_ranks(workers, _share, compute, values, args, deadline, joins=False, timeout=SECONDS)
    found = {index: result for share in shares for index, result in share}
    return [found[index] for index in sorted(found)]


def _share(
    compute: Callable[..., Result], values: Sequence[Any], args: Sequence[Any], deadline: float
) -> list[tuple[int, Result]]:
    """Compute this worker's share of the values."""
    found: list[tuple[int, Result]] = []
    for index in range(int(os.environ["RANK"]), len(values), int(os.environ["WORLD_SIZE"])):
        if found and time.monotonic() > deadline:
            break
        found.append((index, compute(values[index], *args)))
    return found
