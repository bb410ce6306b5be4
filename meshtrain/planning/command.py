"""Show what each process of a run needs on a machine."""

from meshtrain import console
from meshtrain.config.run import RunConfig
from meshtrain.errors import UserError
from meshtrain.planning.changes import smaller
from meshtrain.planning.machine import Machine, find_machine
from meshtrain.planning.needs import find_needs
from meshtrain.planning.report import show_memory, show_time, show_totals, verdict
from meshtrain.planning.totals import totals_of
from meshtrain.training.report import show_plan
from meshtrain.training.resolve import ResolvedRun, resolve_run


def show_needs(config: RunConfig, world_size: int | None, gpu: str) -> bool:
    """Print what each process of a run needs, and return whether it fits a machine.

    Args:
        config: of the run. Its data and weights are not read.
        world_size: number of processes; None: the number that the degrees of the plan need.
        gpu: name of the machine.

    Raises:
        UserError: for a contradiction, or a machine that is not known.
    """
    # Before the model is built, which takes longer. A CPU is shared by all processes.
    find_machine(gpu, world_size or 1)
    resolved = resolve_run(config, world_size)
    machine = find_machine(gpu, resolved.plan.mesh.world_size)
    show_plan(resolved)
    needs = find_needs(resolved, machine)
    show_memory(needs.uses, needs.simulation)
    show_totals([totals_of(group.profile.work()) for group in needs.simulation.groups], needs.simulation)
    show_time(needs.time, machine)
    if resolved.plan.compile.enabled:
        console.line("Layers are simulated without compilation, which changes what they keep.")
    fits, line = verdict(needs.uses, machine, needs.simulation)
    console.line(line)
    if not fits:
        console.line(_advice(resolved, machine))
    return fits


def _advice(resolved: ResolvedRun, machine: Machine) -> str:
    """Return the first of a few changes, small ones first, with which a run fits.

    Each is simulated, not guessed.
    """
    console.line("Looking for a change with which it fits")
    world_size = resolved.plan.mesh.world_size
    for words, changed in smaller(resolved.config, resolved.plan, may_offload=not machine.is_cpu):
        try:
            needs = find_needs(resolve_run(changed, world_size), machine)
        except UserError:
            # The change contradicts something else in the run.
            continue
        fits, line = verdict(needs.uses, machine, needs.simulation)
        if fits:
            return f"With {words}: {line}"
    return "No change of recomputation, resharding, microbatch or offloading makes it fit: shard over more processes."
