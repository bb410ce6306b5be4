"""The seconds of a step on a machine, and where they go."""

from dataclasses import dataclass

from meshtrain.config.machine import SpeedConfig
from meshtrain.parallel.account import flops_per_token
from meshtrain.parallel.shard import needs_fsdp
from meshtrain.planning.assembly.pipeline import Simulation
from meshtrain.planning.names import ranks_named
from meshtrain.planning.speed.rates import TERA, Rates
from meshtrain.planning.speed.replay import Replay, replay
from meshtrain.training.resolve import ResolvedRun


@dataclass(frozen=True)
class StepTime:
    """The time of a step.

    Attributes:
        replay: of the step, event by event.
        tokens_per_second: of one process.
        peak_tflops: of the machine, in the number format of the computation.
        mfu: the operations of the model, without recomputation, relative to this rate.
    """

    replay: Replay
    tokens_per_second: float
    peak_tflops: float
    mfu: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the step."""
        return self.replay.seconds


def step_time(resolved: ResolvedRun, simulation: Simulation, speed: SpeedConfig, *, offloads: bool) -> StepTime:
    """Return how long a step of a run takes.

    Args:
        resolved: the run.
        simulation: of its step.
        speed: of the machine.
        offloads: whether the optimizer runs in host memory.
    """
    plan, batch = resolved.plan, resolved.batch
    rates = Rates(speed, plan.mesh, optimizer_on_host=offloads, posts_sums=not needs_fsdp(plan))
    width = plan.mesh.world_size // plan.mesh.pp
    names = [ranks_named(range(first, first + width)) for first in range(0, plan.mesh.world_size, width)]
    replayed = replay(simulation.profiles, simulation.programs, simulation.border_bytes, rates, names)
    tokens = batch.global_batch_size * batch.sequence_length / replayed.seconds / plan.mesh.world_size
    peak = rates.peak_tflops(plan.precision.products)
    flops = flops_per_token(resolved.model, batch.sequence_length)
    return StepTime(replayed, tokens, peak, flops * tokens / (peak * TERA))
