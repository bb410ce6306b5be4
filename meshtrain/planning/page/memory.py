"""The memory of the processes, at the peak and over the step."""

from meshtrain.pictures.memory import MemoryBar, MemoryCurve
from meshtrain.planning.machine import GIB
from meshtrain.planning.names import ranks_named
from meshtrain.planning.page.curve import memory_curve
from meshtrain.planning.sizing import Sizing
from meshtrain.planning.tables import by_column


def memory_bars(sizing: Sizing) -> tuple[MemoryBar, ...]:
    """Return the memory of each group of processes at its peak, and what comes on top."""
    needs, machine = sizing.needs, sizing.machine
    reserved = int(machine.config.reserved_gib * GIB)
    return tuple(
        MemoryBar(
            ranks_named(needs.ranks(group)),
            {
                **by_column(use.at_peak),
                "reserved": reserved,
                "fragmentation": machine.with_fragmentation(use.peak_bytes) - use.peak_bytes,
            },
            use.moment.described(needs.simulation.first_layers),
        )
        for group, use in enumerate(needs.uses)
    )


def limit_bytes(sizing: Sizing) -> int:
    """Return the memory of the device."""
    return int(sizing.machine.config.memory_gib * GIB)


def worst_curve(sizing: Sizing) -> MemoryCurve:
    """Return the memory over the step of the process that needs the most."""
    needs, machine = sizing.needs, sizing.machine
    time = needs.time
    return memory_curve(
        sizing.fullest_name,
        needs.simulation.groups[needs.fullest].profile,
        None if time is None else time.replay.timeline.lanes[needs.pp_rank(needs.fullest)],
        needs.simulation.first_layers,
        seconds=0.0 if time is None else time.seconds,
        offloads=needs.offloads,
        limit_bytes=int(machine.memory_bytes / (1 + machine.config.fragmentation)),
    )
