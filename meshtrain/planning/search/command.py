"""Search the plan that trains a run fastest on some GPUs, and write it."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from meshtrain import console
from meshtrain.config.run import RunConfig
from meshtrain.config.toml import dump_toml
from meshtrain.data.cache import write_atomically
from meshtrain.errors import ConfigError, PlanError, UserError
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.planning.machine import Machine, find_machine
from meshtrain.planning.names import gib
from meshtrain.planning.search.alternatives import estimated_reason, other_kinds, reason, usual_plans, variants
from meshtrain.planning.search.candidates import Candidate, candidates
from meshtrain.planning.search.estimate import Estimate
from meshtrain.planning.search.ranking import (
    Found,
    Wanted,
    build_estimator,
    kinds_of,
    promising,
    simulate_all,
)
from meshtrain.training.resolve import resolve_run

# How long simulations may begin after the start, for few processes and for many.
SECONDS, MANY_SECONDS, FEW_PROCESSES = 14.0, 95.0, 64
# Candidates that are simulated before the usual plans.
FIRST = 6
# Candidates that are simulated if none of these fits.
SMALLEST = 4
# Estimates that differ by less do not tell which plan is faster.
ALIKE = 1.03
# Settings of a plan that a search sets. Those for one process fit every model.
_ALONE = {
    "mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1},
    "pipeline": {"schedule": "1F1B", "stages_per_rank": 1, "layers_per_stage": "balanced", "split_at": None},
    "tensor": {"sequence_parallel": False},
    "shard": {"reshard_after_forward": "auto", "offload": "none"},
    "recompute": {"mode": "none"},
}


def search(config: RunConfig, pinned: Collection[str], world_size: int, gpu: str, top: int, out: Path) -> None:
    """Print the fastest plans for a run, and write the first of them.

    Args:
        config: of the run. Its data and weights are not read.
        pinned: keys that the user has set, such as "plan.mesh.tp". They are not varied.
        world_size: number of processes.
        gpu: name of the machine.
        top: number of plans to print.
        out: the plan file to write.

    Raises:
        UserError: for a contradiction, a machine that is not known, or if nothing fits.
    """
    begun = time.monotonic()
    machine = find_machine(gpu, world_size)
    wanted = Wanted(config, resolve_run(alone(config), 1), machine, world_size)
    deadline = begun + (SECONDS if world_size <= FEW_PROCESSES else MANY_SECONDS)
    ranking = rank_plans(wanted, pinned, deadline)
    console.line(
        f"Of {ranking.num_candidates:,} plans for {world_size} {gpu}, {len(ranking.simulated)} promising or usual ones "
        f"were simulated in {time.monotonic() - begun:.0f} s"
    )
    if not ranking.fitting:
        _refuse(wanted, ranking.simulated)
    winner = ranking.fitting[0]
    _show(ranking.fitting[:top], machine)
    others = other_kinds(ranking.usual, winner.candidate, _on_host(machine)) | variants(winner.candidate)
    _show_losers(others, ranking, machine)
    _write(wanted, winner, out)


@dataclass(frozen=True)
class Ranking:
    """Plans for a run, from the fastest to the slowest.

    Attributes:
        num_candidates: that came into question.
        simulated: the most promising ones, some that differ from them, and usual ones.
        fitting: those of them that fit the machine, from the fastest one that passes all checks on.
        refused: candidate -> the contradiction.
        usual: name -> the best candidate of each usual kind.
        estimates: of all candidates, in closed form.
    """

    num_candidates: int
    simulated: list[Found]
    fitting: list[Found]
    refused: dict[Candidate, UserError]
    usual: dict[str, Candidate]
    estimates: dict[Candidate, Estimate]


def rank_plans(wanted: Wanted, pinned: Collection[str], deadline: float) -> Ranking:
    """Return the fastest plans for a run.

    Args:
        wanted: the run.
        pinned: keys that the user has set.
        deadline: on the monotonic clock, after which no further plan is simulated.

    Raises:
        UserError: for a contradiction.
    """
    found = _candidates(wanted, pinned)
    estimator = build_estimator(wanted, kinds_of(found))
    limit = wanted.machine.memory_bytes / (1 + wanted.machine.config.fragmentation)
    estimates = {it: estimator.estimate(it) for it in found if estimator.knows(it)}
    best = promising(estimates, limit)
    usual = usual_plans(estimates, limit, _on_host(wanted.machine))
    likely = _quickest_first(best[:FIRST], estimates)
    others = [*(variants(likely[0]).values() if likely else ()), *usual.values(), *best[FIRST:]]
    chosen = [it for it in dict.fromkeys([*likely, *others]) if it in estimates]
    simulated, refused = simulate_all(wanted, chosen, deadline)
    if not any(it.fits for it in simulated):
        # Those that need least tell whether anything fits.
        small = sorted(set(estimates) - set(chosen), key=lambda it: estimates[it].peak_bytes)
        more, further = simulate_all(wanted, small[:SMALLEST], deadline)
        simulated, refused = [*simulated, *more], refused | further
    if not simulated:
        raise next(iter(refused.values()))
    fitting = _without_refused(wanted, [it for it in simulated if it.fits], refused)
    return Ranking(len(found), simulated, fitting, refused, usual, estimates)


def _quickest_first(best: Sequence[Candidate], estimates: Mapping[Candidate, Estimate]) -> list[Candidate]:
    """Return candidates by seconds; of those about as fast, what is quick to simulate comes first.

    With fewer stages on a process, a simulation takes less.
    """
    slow = min((estimates[it].seconds for it in best), default=0.0) * ALIKE
    return sorted(best, key=lambda it: (estimates[it].seconds > slow, it.stages_per_rank, estimates[it].seconds))


def _without_refused(wanted: Wanted, fitting: Sequence[Found], refused: dict[Candidate, UserError]) -> list[Found]:
    """Return the plans from the fastest one that passes all checks on; add the others to `refused`.

    Raises:
        UserError: the contradiction, if there is one in all of them.
    """
    for index, found in enumerate(fitting):
        try:
            wanted.resolved(found.candidate, runs_model=True)
        except UserError as error:
            refused[found.candidate] = error
            if index == len(fitting) - 1:
                raise
            continue
        return [*fitting[index:]]
    return []


def alone(config: RunConfig) -> RunConfig:
    """Return a run with the settings that a search varies as they are on one process."""
    tables = {name: getattr(config.plan, name).model_copy(update=values) for name, values in _ALONE.items()}
    return config.model_copy(update={"plan": config.plan.model_copy(update=tables), "micro_batch_size": 1})


def _on_host(machine: Machine) -> int:
    if machine.config.speed is None:
        raise ConfigError(
            f"--gpu {machine.name}: a search needs to know how fast the machine is, and the description has no table "
            "[speed]",
            "measure it with `meshtrain calibrate FILE`, or name a shipped description such as h100-80gb",
        )
    return machine.config.speed.processes_per_host


def _candidates(wanted: Wanted, pinned: Collection[str]) -> list[Candidate]:
    """Return every plan that comes into question.

    Raises:
        PlanError: if what the user has set excludes all of them.
    """
    num_layers = len(find_layers(wanted.base.model)[1])
    on_host, may_offload = _on_host(wanted.machine), not wanted.machine.is_cpu
    found = list(candidates(wanted.config, pinned, wanted.world_size, num_layers, on_host, may_offload=may_offload))
    if not found:
        # The contradiction is the one that `meshtrain check` finds.
        resolve_run(wanted.config, wanted.world_size)
        raise PlanError(
            f"no plan for {wanted.world_size} processes has the settings {', '.join(sorted(pinned))}",
            "leave some of them out, or take another number of processes",
        )
    return found


def _refuse(wanted: Wanted, simulated: Sequence[Found]) -> NoReturn:
    """Say that nothing fits, with the plan that needs least.

    Raises:
        PlanError: always.
    """
    least = min(simulated, key=lambda it: it.use.peak_bytes)
    lacking = wanted.machine.with_fragmentation(least.use.peak_bytes) - wanted.machine.memory_bytes
    raise PlanError(
        f"none of the {len(simulated)} plans that were simulated fits {wanted.world_size} {wanted.machine.name}: "
        f"{least.candidate.described()} needs least, and {gib(lacking)} GiB too much",
        "take more processes, larger ones, or a smaller model",
    )


def _show(found: Sequence[Found], machine: Machine) -> None:
    rows = [
        (
            rank,
            it.candidate.described(),
            f"{it.time.tokens_per_second:,.0f}",
            f"{it.time.seconds:,.4g}",
            f"{it.time.mfu:.1%}",
            f"{it.time.replay.bubble:.1%}",
            gib(machine.with_fragmentation(it.use.peak_bytes)),
        )
        for rank, it in enumerate(found, start=1)
    ]
    columns = ["", "plan", "tokens/s/process", "seconds", "MFU", "waiting", "peak GiB"]
    console.table(f"The fastest plans that fit {machine.name} ({gib(machine.memory_bytes)} GiB)", columns, rows)


def _show_losers(others: Mapping[str, Candidate], ranking: Ranking, machine: Machine) -> None:
    """Print why the usual plans, and the winner with another setting, are not first."""
    known, winner = {it.candidate: it for it in ranking.simulated}, ranking.fitting[0]
    rows = []
    for name, it in others.items():
        if it in ranking.refused:
            rows.append((name, it.described(), f"refused: {ranking.refused[it].problems[0].found}"))
        elif it in known:
            rows.append((name, it.described(), reason(known[it], winner, machine)))
        elif it in ranking.estimates:
            best = ranking.estimates[winner.candidate]
            rows.append((name, it.described(), estimated_reason(ranking.estimates[it], best, machine)))
    if rows:
        console.table("Why the others lose", ["alternative", "its best plan", "reason"], rows)


def _write(wanted: Wanted, winner: Found, out: Path) -> None:
    rows = winner.candidate.micro_batch_size
    plan = winner.candidate.plan(wanted.config.plan)
    comment = (
        f"# Found by meshtrain search for {wanted.world_size} {wanted.machine.name}, with micro_batch_size = {rows}: "
        f"{winner.time.seconds:,.4g} s a step.\n"
    )
    write_atomically(out, comment + dump_toml(plan))
    console.line(f"Wrote {out}. Train with it: meshtrain train RUN plan={out} micro_batch_size={rows}")
