"""Show what each process of a run needs on a machine."""

from dataclasses import dataclass

from meshtrain import console
from meshtrain.config.run import RunConfig
from meshtrain.errors import UserError
from meshtrain.planning.changes import smaller
from meshtrain.planning.machine import Machine, find_machine
from meshtrain.planning.memory import MemoryUse, memory_use
from meshtrain.planning.report import show_memory, show_totals, verdict
from meshtrain.planning.simulation.pipeline import Simulation, simulate
from meshtrain.planning.simulation.rank import SimulatedRun
from meshtrain.planning.totals import totals_of
from meshtrain.training.report import show_plan
from meshtrain.training.resolve import ResolvedRun, resolve_run


@dataclass(frozen=True)
class Needs:
    """What the processes of a run need.

    Attributes:
        simulation: of a step.
        uses: the memory of the first process of each pp rank.
        width: number of processes of a pp rank.
    """

    simulation: Simulation
    uses: tuple[MemoryUse, ...]
    width: int


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
    show_memory(needs.uses, needs.simulation, needs.width)
    show_totals([totals_of(profile.work()) for profile in needs.simulation.profiles], needs.width)
    if resolved.plan.compile.enabled:
        console.line("Layers are simulated without compilation, which changes what they keep.")
    fits, line = verdict(needs.uses, machine, needs.width)
    console.line(line)
    if not fits:
        console.line(_advice(resolved, machine))
    return fits


def find_needs(resolved: ResolvedRun, machine: Machine) -> Needs:
    """Simulate a run, and return what its processes need."""
    plan = resolved.plan
    simulation = simulate(simulated_run(resolved, machine))
    offloads = plan.shard.offload == "cpu" and not machine.is_cpu
    uses = tuple(memory_use(profile, offloads=offloads) for profile in simulation.profiles)
    return Needs(simulation, uses, plan.mesh.world_size // plan.mesh.pp)


def simulated_run(resolved: ResolvedRun, machine: Machine) -> SimulatedRun:
    """Return what the simulation of a run on a machine needs."""
    config = resolved.config
    inputs = {"packed": (), "padded": ("attention_mask",)}[config.data.form]
    if config.data.documents == "separate":
        inputs = ("position_ids",)
    return SimulatedRun(
        hf_config=resolved.hf_config,
        attention=config.model.attention,
        trust_remote_code=config.model.trust_remote_code,
        plan=resolved.plan,
        batch=resolved.batch,
        inputs=inputs,
        optimizer=config.optimizer,
        granularity=machine.granularity,
        on_gpus=not machine.is_cpu,
    )


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
        fits, line = verdict(needs.uses, machine, needs.width)
        if fits:
            return f"With {words}: {line}"
    return "No change of recomputation, resharding, microbatch or offloading makes it fit: shard over more processes."
