"""What the processes of a run need on a machine: memory and seconds."""

from dataclasses import dataclass
from functools import cached_property

from meshtrain.planning.assembly.pipeline import Simulation, simulate
from meshtrain.planning.machine import Machine
from meshtrain.planning.memory import MemoryUse, memory_use
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.planning.speed.step_time import StepTime, step_time
from meshtrain.planning.totals import Totals, totals_of
from meshtrain.training.resolve import ResolvedRun


@dataclass(frozen=True)
class Needs:
    """What the processes of a run need.

    Attributes:
        simulation: of a step.
        uses: the memory of each group of processes of the simulation.
        width: number of processes of a pp rank.
        time: of a step; None if it is not known how fast the machine is.
        offloads: whether parameters, gradients and optimizer state are in host memory that is not
            the memory of the processes.
    """

    simulation: Simulation
    uses: tuple[MemoryUse, ...]
    width: int
    time: StepTime | None
    offloads: bool = False

    @property
    def fullest(self) -> int:
        """Return the index of the group of processes that needs the most memory."""
        return max(range(len(self.uses)), key=lambda group: self.uses[group].peak_bytes)

    def ranks(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group of processes."""
        return self.simulation.groups[group].ranks

    def pp_rank(self, group: int) -> int:
        """Return the pp rank of a group of processes."""
        return self.ranks(group)[0] // self.width

    @property
    def peak_bytes(self) -> int:
        """Return the memory of the fullest process."""
        return self.uses[self.fullest].peak_bytes

    def peaks_of_pp_ranks(self) -> tuple[int, ...]:
        """Return the memory of the fullest process of each pp rank."""
        peaks: dict[int, int] = {}
        for group, use in enumerate(self.uses):
            pp_rank = self.pp_rank(group)
            peaks[pp_rank] = max(peaks.get(pp_rank, 0), use.peak_bytes)
        return tuple(peaks[pp_rank] for pp_rank in sorted(peaks))

    @cached_property
    def totals(self) -> tuple[Totals, ...]:
        """Return messages and work of each group of processes."""
        return tuple(totals_of(group.profile.work()) for group in self.simulation.groups)


def find_needs(resolved: ResolvedRun, machine: Machine) -> Needs:
    """Simulate a run, and return what its processes need."""
    plan = resolved.plan
    run = simulated_run(resolved, on_gpus=not machine.is_cpu, granularity=machine.granularity)
    simulation = simulate(run)
    offloads = plan.shard.offload == "cpu" and not machine.is_cpu
    uses = tuple(memory_use(group.profile, offloads=offloads) for group in simulation.groups)
    speed = machine.config.speed
    time = None if speed is None else step_time(resolved, simulation, speed, offloads=offloads)
    return Needs(simulation, uses, plan.mesh.world_size // plan.mesh.pp, time, offloads)


def simulated_run(resolved: ResolvedRun, *, on_gpus: bool, granularity: int = 1) -> SimulatedRun:
    """Return what the simulation of a run needs.

    Args:
        resolved: the run.
        on_gpus: whether it computes there.
        granularity: of the allocator in bytes.
    """
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
        router=config.router,
        lora=config.lora,
        objective=config.objective,
        preference=config.preference,
        has_weights=config.data.has_weights,
        teacher=resolved.teacher,
        ema=config.ema,
        granularity=granularity,
        on_gpus=on_gpus,
    )
