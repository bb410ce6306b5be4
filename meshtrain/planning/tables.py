"""The tables of what each process needs. The screen and the page show the same ones."""

from collections.abc import Mapping, Sequence

from meshtrain.pictures.tables import Table
from meshtrain.planning.names import gib, rank_range, shown_seconds
from meshtrain.planning.needs import Needs
from meshtrain.planning.simulation.recorder import Role
from meshtrain.planning.speed.step_time import StepTime
from meshtrain.planning.totals import Totals

# Column -> the roles that it sums.
COLUMNS: dict[str, tuple[Role, ...]] = {
    "parameters": (Role.PARAMETERS, Role.BUFFERS, Role.TEACHER),
    "gathered": (Role.GATHERED,),
    "gradients": (Role.GRADIENTS,),
    "unreduced": (Role.UNREDUCED,),
    "optimizer": (Role.OPTIMIZER,),
    "activations": (Role.ACTIVATIONS,),
    "loss": (Role.LOSS,),
    "messages": (Role.MESSAGES, Role.BATCH),
    "temporary": (Role.TEMPORARY,),
}


def by_column(sizes: Mapping[Role, int]) -> dict[str, int]:
    """Return column -> bytes."""
    return {name: sum(sizes.get(role, 0) for role in roles) for name, roles in COLUMNS.items()}


def memory_table(needs: Needs) -> Table:
    """Return the memory of each group of processes, at its peak."""
    parts = [by_column(use.at_peak) for use in needs.uses]
    columns = [name for name in COLUMNS if any(sizes[name] for sizes in parts)]
    rows = tuple(
        (
            rank_range(needs.ranks(group)),
            gib(use.peak_bytes),
            *(gib(parts[group][name]) for name in columns),
            use.moment.described(needs.simulation.first_layers),
        )
        for group, use in enumerate(needs.uses)
    )
    return Table("Memory of a process at its peak, in GiB", ("ranks", "peak", *columns, "when"), rows)


def messages_table(needs: Needs) -> Table:
    """Return the messages of each group of processes; like neighbors are left out."""
    rows = tuple(
        (rank_range(needs.ranks(group)), axis, name, f"{number:,}", gib(size))
        for group in distinct(needs.totals)
        for (axis, name), (number, size) in needs.totals[group].messages.items()
    )
    return Table("Messages of a process in a step", ("ranks", "axis", "operator", "number", "GiB"), rows)


def work_table(needs: Needs) -> Table:
    """Return the work of each group of processes; like neighbors are left out."""
    rows = tuple(
        (rank_range(needs.ranks(group)), f"{needs.totals[group].flops / 1e12:,.3f}") for group in distinct(needs.totals)
    )
    return Table("Work of a process in a step", ("ranks", "TFLOP"), rows)


def axes_table(time: StepTime) -> Table:
    """Return bytes and seconds of the messages over each axis."""
    rows = tuple(
        (axis, gib(times.num_bytes), shown_seconds(times.seconds), shown_seconds(times.exposed_seconds))
        for axis, times in sorted(time.replay.axes.items())
    )
    title = "Messages of a process in a step, where they cost most"
    return Table(title, ("axis", "GiB", "seconds", "exposed seconds"), rows)


def distinct(totals: Sequence[Totals]) -> list[int]:
    """Return the groups of processes whose totals differ from those of the group before."""
    return [group for group, total in enumerate(totals) if group == 0 or total != totals[group - 1]]
