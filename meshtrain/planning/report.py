"""The tables of what each process needs."""

from collections.abc import Sequence
from itertools import groupby

from meshtrain import console
from meshtrain.planning.machine import GIB, Machine
from meshtrain.planning.memory import MemoryUse
from meshtrain.planning.simulation.pipeline import Simulation
from meshtrain.planning.simulation.recorder import Role
from meshtrain.planning.speed.step_time import StepTime
from meshtrain.planning.totals import Totals

# More pieces of a list of ranks are not shown.
MOST_PIECES = 3
# Column -> the roles that it sums.
COLUMNS: dict[str, tuple[Role, ...]] = {
    "parameters": (Role.PARAMETERS, Role.BUFFERS),
    "gathered": (Role.GATHERED,),
    "gradients": (Role.GRADIENTS,),
    "unreduced": (Role.UNREDUCED,),
    "optimizer": (Role.OPTIMIZER,),
    "activations": (Role.ACTIVATIONS,),
    "loss": (Role.LOSS,),
    "messages": (Role.MESSAGES, Role.BATCH),
    "temporary": (Role.TEMPORARY,),
}


def show_memory(uses: Sequence[MemoryUse], simulation: Simulation) -> None:
    """Print the memory of each group of processes at its peak.

    Args:
        uses: of the groups of the simulation.
        simulation: of the run.
    """
    columns = [name for name, roles in COLUMNS.items() if any(use.at_peak.get(role) for use in uses for role in roles)]
    rows = [
        (
            shown_ranks(group.ranks),
            gib(use.peak_bytes),
            *(gib(sum(use.at_peak.get(role, 0) for role in COLUMNS[name])) for name in columns),
            use.moment.described(simulation.first_layers),
        )
        for group, use in zip(simulation.groups, uses, strict=True)
    ]
    console.table("Memory of a process at its peak, in GiB", ["ranks", "peak", *columns, "when"], rows)
    if host := max(use.host_bytes for use in uses):
        console.line(f"In host memory are up to {gib(host)} GiB of each process.")


def show_totals(totals: Sequence[Totals], simulation: Simulation) -> None:
    """Print the messages and the work of the groups of processes that differ in them."""
    distinct = [(shown_ranks(simulation.groups[index].ranks), totals[index]) for index in _distinct(totals)]
    rows = [
        (ranks, axis, name, f"{number:,}", gib(size))
        for ranks, total in distinct
        for (axis, name), (number, size) in total.messages.items()
    ]
    if rows:
        console.table("Messages of a process in a step", ["ranks", "axis", "operator", "number", "GiB"], rows)
    flops = [(ranks, f"{total.flops / 1e12:,.3f}") for ranks, total in distinct]
    console.table("Work of a process in a step", ["ranks", "TFLOP"], flops)


def show_time(time: StepTime | None, machine: Machine) -> None:
    """Print how long a step takes, and where the time goes."""
    if time is None:
        console.line(f"How long a step takes is not known: {machine.name} has no table [speed].")
        return
    rows = [
        (axis, gib(times.num_bytes), _seconds(times.seconds), _seconds(times.exposed_seconds))
        for axis, times in sorted(time.replay.axes.items())
    ]
    if rows:
        columns = ["axis", "GiB", "seconds", "exposed seconds"]
        console.table("Messages of a process in a step, where they cost most", columns, rows)
    has_stages = len(time.replay.timeline.lanes) > 1
    bubble = f", {time.replay.bubble:.1%} of it waiting for other stages" if has_stages else ""
    console.line(
        f"A step takes {_seconds(time.seconds)} s{bubble}: {time.tokens_per_second:,.0f} tokens per second and "
        f"process, MFU {time.mfu:.1%} of {time.peak_tflops:,.4g} TFLOP/s."
    )
    estimates = [name.removeprefix("speed.") for name in machine.config.not_measured() if name.startswith("speed.")]
    if estimates:
        console.line(f"Not measured, but taken from datasheets or assumed: {', '.join(estimates)}.")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.4g}"


def verdict(uses: Sequence[MemoryUse], machine: Machine, simulation: Simulation) -> tuple[bool, str]:
    """Return whether every process fits, and a line that says so."""
    index = max(range(len(uses)), key=lambda index: uses[index].peak_bytes)
    use, limit, ranks = uses[index], machine.memory_bytes, simulation.groups[index].ranks
    held = machine.with_fragmentation(use.peak_bytes)
    who = f"rank {ranks[0]} needs" if len(ranks) == 1 else f"ranks {shown_ranks(ranks)} need"
    besides = _besides(machine)
    if held <= limit:
        return True, f"It fits {machine.name}: {who} the most, and {gib(limit - held)} GiB are left.{besides}"
    role, size = max(use.at_peak.items(), key=lambda item: item[1])
    return False, (
        f"It does not fit {machine.name}: {who} {gib(held - limit)} GiB more. The largest part is {role}, "
        f"{gib(size)} GiB.{besides}"
    )


def _besides(machine: Machine) -> str:
    config = machine.config
    if not (config.reserved_gib or config.fragmentation):
        return ""
    known = "Assumed, not measured" if "reserved_gib" in config.not_measured() else "Besides tensors"
    return (
        f" {known}: {config.reserved_gib:g} GiB for CUDA and NCCL, and {config.fragmentation:.0%} of the peak that "
        "torch's allocator holds in pieces."
    )


def _distinct(totals: Sequence[Totals]) -> list[int]:
    """Return the groups of processes whose totals differ from those of the group before."""
    return [rank for rank, total in enumerate(totals) if rank == 0 or total != totals[rank - 1]]


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as "0-6, 8-14"; of many pieces the first ones, and how many ranks there are."""
    runs = [[at for _, at in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    pieces = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(pieces) <= MOST_PIECES:
        return ", ".join(pieces)
    return f"{', '.join(pieces[:MOST_PIECES])} and others, {len(ranks)} in all"


def gib(num_bytes: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{num_bytes / GIB:,.2f}" if num_bytes >= 0.1 * GIB else f"{num_bytes / GIB:.4f}"
