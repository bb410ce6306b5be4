"""Candidates from the fastest to the slowest: in closed form first, the best ones simulated."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from meshtrain.config.schedules import SCHEDULES
from meshtrain.errors import PlanError, UserError
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.experts.stacks import numbers_of_experts
from meshtrain.planning.cores import on_all_cores
from meshtrain.planning.memory import MemoryUse
from meshtrain.planning.needs import find_needs
from meshtrain.planning.search.alternatives import usual_plans, variants
from meshtrain.planning.search.candidates import Candidate, candidates
from meshtrain.planning.search.estimate import Estimate
from meshtrain.planning.search.kinds import build_estimator
from meshtrain.planning.search.wanted import Wanted
from meshtrain.planning.speed.step_time import StepTime
from meshtrain.training.resolve import resolve_run

# Candidates that are simulated, and of these with one mesh, and with schedules that take long.
SIMULATED, FEW, MOST_SPLIT, MOST_STAGES = 20, 4, 4, 3
# Stages of a process from which its schedule takes long.
MANY_STAGES = 3
# Those that are simulated before the usual plans, and those that are if nothing fits.
FIRST, SMALLEST = 6, 4
# An estimate of memory may be this far off, and the candidate is still simulated.
MARGIN = 1.15
# Estimates of seconds hardly tell which plan is faster within a step of this factor.
ALIKE = 1.03


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
class Ranking:
    """Plans for a run, from the fastest to the slowest.

    Attributes:
        simulated: the most promising ones, some that differ from them, and usual ones.
        fitting: those of them that fit the machine, from the fastest one that passes all checks on.
        refused: candidate -> the contradiction.
        usual: name -> the best candidate of each usual kind.
        estimates: of all candidates, in closed form.
    """

    simulated: list[Found]
    fitting: list[Found]
    refused: dict[Candidate, UserError]
    usual: dict[str, Candidate]
    estimates: dict[Candidate, Estimate]


def rank_plans(wanted: Wanted, pinned: Collection[str], on_host: int, deadline: float) -> Ranking:
    """Return the fastest plans for a run.

    Args:
        wanted: the run.
        pinned: keys that the user has set.
        on_host: number of processes on a host.
        deadline: on the monotonic clock, at which simulations should end.

    Raises:
        UserError: if all plans contradict the run.
    """
    found = _candidates(wanted, pinned, on_host)
    estimator = build_estimator(wanted, found)
    limit = wanted.machine.memory_bytes / (1 + wanted.machine.config.fragmentation)
    estimates = {it: estimator.estimate(it) for it in found if estimator.knows(it)}
    best = promising(estimates, limit)
    usual = usual_plans(estimates, limit, on_host)
    likely = quickest_first(best[:FIRST], estimates, limit)
    rest = quickest_first(best[FIRST:], estimates, limit)
    others = [*(variants(likely[0]).values() if likely else ()), *usual.values(), *rest]
    chosen = [it for it in dict.fromkeys([*likely, *others]) if it in estimates]
    simulated, refused = simulate_all(wanted, chosen, deadline)
    if not any(it.fits for it in simulated):
        # Those that need least tell whether anything fits.
        small = sorted(set(estimates) - set(chosen), key=lambda it: estimates[it].peak_bytes)
        more, further = simulate_all(wanted, small[:SMALLEST], deadline)
        simulated, refused = [*simulated, *more], refused | further
    fitting, further = _checked(wanted, [it for it in simulated if it.fits])
    refused |= further
    if not fitting and (further or not simulated):
        raise next(iter((further or refused).values()))
    return Ranking(simulated, fitting, refused, usual, estimates)


def _candidates(wanted: Wanted, pinned: Collection[str], on_host: int) -> list[Candidate]:
    """Return every plan that comes into question.

    Raises:
        PlanError: if what the user has set excludes all of them.
    """
    num_layers = len(find_layers(wanted.base.model)[1])
    may_offload = not wanted.machine.is_cpu
    found = list(
        candidates(
            wanted.config,
            pinned,
            wanted.world_size,
            num_layers,
            on_host,
            may_offload=may_offload,
            num_experts=math.gcd(*numbers_of_experts(wanted.base.model).values()),
            takes_cp=wanted.takes_cp(),
        )
    )
    if not found:
        # The contradiction is the one that `meshtrain check` finds.
        resolve_run(wanted.config, wanted.world_size)
        raise PlanError(
            f"no plan for {wanted.world_size} processes has the settings {', '.join(sorted(pinned))}",
            "leave some of them out, or take another number of processes",
        )
    return found


def promising(estimates: Mapping[Candidate, Estimate], limit_bytes: float) -> list[Candidate]:
    """Return the fastest candidates that should fit, and then those that may fit.

    There are not too many of one mesh, nor of schedules that take long to simulate: those with
    separate weight gradients, where all layers of a stage are simulated, and those with many stages
    on a process. These come last.
    """

    def should_fit(candidate: Candidate) -> bool:
        return candidate in estimates and estimates[candidate].peak_bytes <= limit_bytes

    def is_useful(candidate: Candidate) -> bool:
        # What fits without offloading only takes longer with it.
        if candidate.offload == "cpu" and should_fit(replace(candidate, offload="none")):
            return False
        # Loss parallelism changes little else: the faster of both comes into question.
        other = replace(candidate, loss_parallel=not candidate.loss_parallel)
        if not should_fit(other):
            return True
        seconds, others = estimates[candidate].seconds, estimates[other].seconds
        return seconds < others or (seconds == others and candidate.loss_parallel)

    fastest = sorted(estimates, key=lambda it: estimates[it].seconds)
    fitting = (it for it in fastest if should_fit(it) and is_useful(it))
    near = (it for it in fastest if limit_bytes < estimates[it].peak_bytes <= limit_bytes * MARGIN)
    chosen = islice(_few_of_each(chain(fitting, filter(is_useful, near))), SIMULATED)
    return sorted(chosen, key=_splits_backward)


def _few_of_each(found: Iterable[Candidate]) -> Iterator[Candidate]:
    meshes: Counter[tuple[int, ...]] = Counter()
    num_split = num_many = 0
    for candidate in found:
        is_split, has_many = _splits_backward(candidate), candidate.stages_per_rank >= MANY_STAGES
        is_one_more = (is_split and num_split == MOST_SPLIT) or (has_many and num_many == MOST_STAGES)
        if meshes[candidate.mesh] < FEW and not is_one_more:
            meshes[candidate.mesh] += 1
            num_split += is_split
            num_many += has_many
            yield candidate


def _splits_backward(candidate: Candidate) -> bool:
    return candidate.pp > 1 and SCHEDULES[candidate.schedule].splits_backward


def quickest_first(
    best: Sequence[Candidate], estimates: Mapping[Candidate, Estimate], limit_bytes: float
) -> list[Candidate]:
    """Return candidates by seconds; of those about as fast, what is quick to simulate comes first.

    Behind them are those that may not fit, and then those with separate weight gradients.
    """
    fastest = min((estimates[it].seconds for it in best), default=0.0)

    def key(it: Candidate) -> tuple[float, ...]:
        seconds = estimates[it].seconds
        may_not_fit = estimates[it].peak_bytes > limit_bytes
        return _splits_backward(it), may_not_fit, int(math.log(seconds / fastest, ALIKE)), _cost(it), seconds

    return sorted(best, key=key)


def simulate_all(
    wanted: Wanted, found: Sequence[Candidate], deadline: float
) -> tuple[list[Found], dict[Candidate, UserError]]:
    """Simulate candidates.

    Args:
        wanted: the run.
        found: the candidates, the most promising ones first.
        deadline: on the monotonic clock, at which simulations should end. Each core simulates at
            least one.

    Returns:
        Those that were simulated, from the fastest to the slowest; and what contradicts the run.
    """
    # With the same tp and microbatch, the layers have operators of the same shapes.
    kinds = [(it.tp, it.micro_batch_size) for it in found]
    answers = on_all_cores(_simulated, found, wanted, deadline=deadline, costs=[*map(_cost, found)], kinds=kinds)
    simulated = sorted((it for it in answers if isinstance(it, Found)), key=lambda it: it.time.seconds)
    return simulated, dict(it for it in answers if not isinstance(it, Found))


def _cost(candidate: Candidate) -> float:
    """Return about how long a simulation takes, relative to others."""
    if candidate.pp == 1:
        return 0.5
    # Of several stages like each other two are simulated, and all layers of those that split.
    return min(candidate.stages_per_rank, 2) * (1.6 if _splits_backward(candidate) else 1.0)


def _simulated(candidate: Candidate, wanted: Wanted) -> Found | tuple[Candidate, UserError]:
    """Return a simulated candidate, or what contradicts it."""
    needs = wanted.attempted(candidate, lambda: find_needs(wanted.resolved(candidate), wanted.machine))
    if isinstance(needs, UserError):
        return candidate, needs
    assert needs.time is not None
    use = needs.uses[needs.fullest]
    fits = wanted.machine.with_fragmentation(use.peak_bytes) <= wanted.machine.memory_bytes
    # Timelines are long, and take a second on their way to the process that searches.
    time = replace(needs.time, replay=needs.time.replay.without_timeline())
    return Found(candidate, use, time, fits)


def _checked(wanted: Wanted, fitting: Sequence[Found]) -> tuple[list[Found], dict[Candidate, UserError]]:
    """Return the plans from the fastest one that passes all checks, and why others do not."""
    refused: dict[Candidate, UserError] = {}
    for index, found in enumerate(fitting):
        contradiction = wanted.contradiction(found.candidate)
        if contradiction is None:
            return [*fitting[index:]], refused
        refused[found.candidate] = contradiction
    return [], refused
