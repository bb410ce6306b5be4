"""Show what each process of a run needs on a machine."""

from pathlib import Path

from meshtrain import console
from meshtrain.config.reading import shown_path
from meshtrain.config.run import RunConfig
from meshtrain.data.cache import write_atomically
from meshtrain.errors import UserError, reason_of
from meshtrain.planning.changes import smaller
from meshtrain.planning.machine import Machine, find_machine
from meshtrain.planning.needs import find_needs
from meshtrain.planning.page.page import plan_page
from meshtrain.planning.report import show_tables
from meshtrain.planning.sizing import Sizing
from meshtrain.planning.verdict import verdict
from meshtrain.training.report import show_plan
from meshtrain.training.resolve import ResolvedRun, resolve_run

NO_CHANGE = "No change of recomputation, resharding, microbatch or offloading makes it fit: shard over more processes."


def show_needs(config: RunConfig, world_size: int | None, gpu: str, html: Path | None = None) -> bool:
    """Print what each process of a run needs, and return whether it fits a machine.

    Args:
        config: of the run. Its data and weights are not read.
        world_size: number of processes; None: the number that the degrees of the plan need.
        gpu: name of the machine.
        html: the page to write, if any.

    Raises:
        UserError: for a contradiction, a machine that is not known, or a page that cannot be
            written.
    """
    # Before the model is built, which takes longer. A CPU is shared by all processes.
    find_machine(gpu, world_size or 1).check_number_format(config.plan.precision.products)
    resolved = resolve_run(config, world_size)
    machine = find_machine(gpu, resolved.plan.mesh.world_size)
    show_plan(resolved)
    needs = find_needs(resolved, machine)
    show_tables(needs, resolved, machine)
    found = verdict(needs, machine)
    console.line(f"{found.sentence} {found.besides}".rstrip())
    advice = "" if found.fits else _advice(resolved, machine)
    if advice:
        console.line(advice)
    if html is not None:
        _write(html, plan_page(Sizing(resolved, machine, needs, found, advice)))
    return found.fits


def _write(html: Path, page: str) -> None:
    try:
        write_atomically(html, page)
    except OSError as error:
        raise UserError(f"--html: {html} cannot be written: {reason_of(error)}", "choose another file") from error
    console.line(f"Page: {shown_path(html)}")


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
        found = verdict(needs, machine)
        if found.fits:
            return f"With {words}: {found.sentence}"
    return NO_CHANGE
