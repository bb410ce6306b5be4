"""Search the plan that trains a run fastest on some GPUs, and write it."""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from meshtrain import console
from meshtrain.config.run import RunConfig
from meshtrain.config.toml import dump_toml
from meshtrain.data.cache import write_atomically
from meshtrain.errors import ConfigError, PlanError
from meshtrain.planning.machine import Machine, find_machine
from meshtrain.planning.names import gib
from meshtrain.planning.search.alternatives import other_kinds, variants
from meshtrain.planning.search.candidates import Candidate
from meshtrain.planning.search.ranking import Found, Ranking, rank_plans
from meshtrain.planning.search.reasons import estimated_reason, reason
from meshtrain.planning.search.wanted import Wanted, wanted_run

# Seconds from the start to the end of simulations, for few processes and for many.
SECONDS, MANY_SECONDS, FEW_PROCESSES = 23.0, 105.0, 64


def search(
    config: RunConfig,
    pinned: Collection[str],
    world_size: int,
    gpu: str,
    top: int,
    out: Path,
    seconds: float | None = None,
) -> None:
    """Print the fastest plans for a run, and write the first of them.

    Args:
        config: of the run. Its data and weights are not read.
        pinned: keys that the user has set, such as "plan.mesh.tp". They are not varied.
        world_size: number of processes.
        gpu: name of the machine.
        top: number of plans to print.
        out: the plan file to write.
        seconds: after which simulations should end; by default a few.

    Raises:
        UserError: for a contradiction, a machine that is not known, or if nothing fits.
    """
    if config.distillation.teacher is not None:
        raise ConfigError(
            "the search does not know the memory and the time of a teacher, and `distillation.teacher` is set",
            "leave it out while you search, and check the plan found with `meshtrain plan`",
        )
    begun = time.monotonic()
    machine = find_machine(gpu, world_size)
    on_host = _on_host(machine)
    wanted = wanted_run(config, machine, world_size)
    seconds = seconds or (SECONDS if world_size <= FEW_PROCESSES else MANY_SECONDS)
    ranking = rank_plans(wanted, pinned, on_host, begun + seconds)
    console.line(
        f"Of {len(ranking.estimates):,} plans for {world_size} {gpu}, {len(ranking.simulated)} promising or usual ones "
        f"were simulated in {time.monotonic() - begun:.0f} s"
    )
    if not ranking.fitting:
        _refuse(wanted, ranking.simulated)
    winner = ranking.fitting[0]
    _show(ranking.fitting[:top], machine)
    others = other_kinds(ranking.usual, winner.candidate, on_host) | variants(winner.candidate)
    _show_losers(others, ranking, machine)
    _write(wanted, winner, out)


def _on_host(machine: Machine) -> int:
    if machine.config.speed is None:
        raise ConfigError(
            f"--gpu {machine.name}: a search needs to know how fast the machine is, and the description has no table "
            "[speed]",
            "measure it with `meshtrain calibrate FILE`, or name a shipped description such as h100-80gb",
        )
    return machine.config.speed.processes_per_host


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
        "take more processes, a machine with more memory, or a smaller model",
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
