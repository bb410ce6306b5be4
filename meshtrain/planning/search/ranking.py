"""The best candidates, simulated."""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from meshtrain.config.plan import TensorPlan
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
from meshtrain.planning.search.estimate import MORE_ROWS, Estimate, Estimator, ModelSizes
from meshtrain.planning.search.layers import MICROBATCHES, LayerNeeds, layer_needs
from meshtrain.planning.simulation.pipeline import simulate
from meshtrain.planning.simulation.rank import SimulatedRun
from meshtrain.planning.speed.step_time import StepTime
from meshtrain.runtime.ranks import program_hidden, run_on_ranks
from meshtrain.training.resolve import ResolvedRun

Result = TypeVar("Result")
# Candidates that are simulated, of these with one mesh or a separate backward pass, and how long
# it may take.
SIMULATED, FEW, MOST_SPLIT, TIMEOUT = 20, 4, 4, 3600.0
# An estimate may be this far off, and the candidate is still simulated.
MARGIN = 1.15


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

    def resolved(self, candidate: Candidate, *, runs_model: bool = False) -> ResolvedRun:
        """Return the run with the plan of a candidate.

        Args:
            candidate: its settings.
            runs_model: whether to run the model on meta, as `meshtrain check` does.

        Raises:
            UserError: if the plan contradicts the model or the batches.
        """
        # A plan that is written has the settings of the user, without those of the model's family.
        written, plan, rows = (
            candidate.plan(self.config.plan),
            candidate.plan(self.base.plan),
            candidate.micro_batch_size,
        )
        cut = {"layers_per_stage": written.pipeline.layers_per_stage, "split_at": written.pipeline.split_at}
        plan = plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update=cut)})
        config = self.config.model_copy(update={"plan": written, "micro_batch_size": rows})
        length = self.base.batch.sequence_length
        batch = BatchShape(self.config.global_batch_size, rows, length, self.base.batch.width_multiple)
        plan = resolve_plan(
            plan,
            self.base.model,
            batch,
            self.world_size,
            known_tensor=None if runs_model else self.tensors.get(candidate.kind[:2]),
            runs_model=runs_model,
        )
        return replace(self.base, config=config, plan=plan, batch=batch)

    def of_layers(self, kind: Kind, rows: int) -> SimulatedRun:
        """Return a step on one stage, to look at its layers.

        Args:
            kind: tp, sequence parallel and recomputation.
            rows: sequences of a microbatch.

        Raises:
            UserError: if the model refuses such a plan.
        """
        tp, sequence_parallel, recompute = kind
        candidate = Candidate(1, 1, 1, tp, "1F1B", 1, rows, recompute, sequence_parallel, "never", "none")
        config = self.config.model_copy(update={"global_batch_size": MICROBATCHES * rows})
        resolved = replace(self, config=config, world_size=tp).resolved(candidate)
        self.tensors[kind[:2]] = resolved.plan.tensor
        return simulated_run(resolved, on_gpus=not self.machine.is_cpu, granularity=self.machine.granularity)


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
        wanted: the run. It then knows the tensor rules of these kinds.
        kinds: tp, sequence parallel and recomputation. Those that the model refuses are left out.
            Without sequence parallelism more memory is needed for the same seconds, so that is left
            out where the model allows it.
    """
    degrees = sorted({tp for tp, _, _ in kinds})
    sizes, speed = model_sizes(wanted.base), wanted.machine.config.speed
    assert speed is not None
    needs: dict[Kind, LayerNeeds] = {}
    more: dict[tuple[int, bool], tuple[Kind, LayerNeeds]] = {}
    refusals: list[UserError] = []
    for found in _on_all_cores(_needs_of_kinds, degrees, wanted, kinds, len(sizes.layers)):
        needs |= found.needs
        more |= found.more_needs
        wanted.tensors.update(found.tensors)
        refusals += found.refusals
    if not needs:
        raise refusals[0]
    return Estimator(wanted.base.plan, wanted.config.global_batch_size, sizes, needs, more, speed)


@dataclass(frozen=True)
class _KindNeeds:
    """What layers need with one degree of tp, as in `Estimator`, the tensor rules, and refusals."""

    needs: dict[Kind, LayerNeeds]
    more_needs: dict[tuple[int, bool], tuple[Kind, LayerNeeds]]
    tensors: dict[tuple[int, bool], TensorPlan]
    refusals: list[UserError]


def _needs_of_kinds(tp: int, wanted: Wanted, kinds: Sequence[Kind], num_layers: int) -> _KindNeeds:
    found = _KindNeeds({}, {}, wanted.tensors, [])

    def needs_of(kind: Kind, rows: int) -> LayerNeeds:
        return layer_needs(simulate(wanted.of_layers(kind, rows)).profiles[0], num_layers)

    # Without recomputation, less of the work of a layer is that of the parameters alone.
    for kind in sorted((it for it in kinds if it[0] == tp), key=lambda it: (not it[1], it[2] != "none")):
        if (tp, True, kind[2]) in found.needs:
            continue
        try:
            needs = needs_of(kind, 1)
            if kind[:2] not in found.more_needs:
                found.more_needs[kind[:2]] = kind, needs_of(kind, MORE_ROWS)
        except UserError as error:
            # Such a plan contradicts the model.
            found.refusals.append(error)
            continue
        found.needs[kind] = needs
    return found


def kinds_of(found: Sequence[Candidate]) -> list[Kind]:
    """Return tp, sequence parallel and recomputation of all candidates, each once."""
    return sorted({it.kind for it in found})


def promising(estimates: Mapping[Candidate, Estimate], limit_bytes: float) -> list[Candidate]:
    """Return the fastest candidates that should fit, and then those that may fit.

    There are not too many of one mesh, nor of schedules with separate weight gradients: all layers
    of their stages are simulated, which takes long. These come last.
    """
    chosen: list[Candidate] = []
    doubtful: list[Candidate] = []
    numbers: Counter[object] = Counter()
    for candidate in sorted(estimates, key=lambda it: estimates[it].seconds):
        is_split = candidate.pp > 1 and SCHEDULES[candidate.schedule].splits_backward
        without = replace(candidate, offload="none")
        if without != candidate and without in estimates and estimates[without].peak_bytes <= limit_bytes:
            # It fits without offloading, which takes longer.
            continue
        if numbers[candidate.mesh] == FEW or (is_split and numbers["split"] == MOST_SPLIT):
            continue
        peak_bytes = estimates[candidate].peak_bytes
        if peak_bytes > limit_bytes * MARGIN or (peak_bytes > limit_bytes and numbers["doubtful"] == SIMULATED):
            continue
        is_doubtful = peak_bytes > limit_bytes
        (doubtful if is_doubtful else chosen).append(candidate)
        numbers.update([candidate.mesh, *(["split"] if is_split else []), *(["doubtful"] if is_doubtful else [])])
        if len(chosen) == SIMULATED:
            break
    chosen += doubtful[: SIMULATED - len(chosen)]
    return sorted(chosen, key=lambda it: it.pp > 1 and SCHEDULES[it.schedule].splits_backward)


def simulate_all(
    wanted: Wanted, candidates: Sequence[Candidate], deadline: float
) -> tuple[list[Found], dict[Candidate, UserError]]:
    """Simulate candidates.

    Args:
        wanted: the run.
        candidates: the most promising ones first.
        deadline: on the monotonic clock, after which no further one is begun, except the first on
            each core.

    Returns:
        Those that were simulated, from the fastest to the slowest; and what contradicts the run.
    """
    answers = _on_all_cores(_simulated, candidates, wanted, deadline=deadline)
    found = sorted((it for it in answers if isinstance(it, Found)), key=lambda it: it.time.seconds)
    return found, dict(it for it in answers if not isinstance(it, Found))


def _simulated(candidate: Candidate, wanted: Wanted) -> Found | tuple[Candidate, UserError]:
    """Return a simulated candidate, or what contradicts it."""
    try:
        needs = find_needs(wanted.resolved(candidate), wanted.machine)
    except UserError as error:
        return candidate, error
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
        shares = run_on_ranks(workers, _share, compute, values, args, deadline, joins=False, timeout=TIMEOUT)
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
