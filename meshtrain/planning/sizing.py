"""A run on a machine: all that is known before its launch."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from meshtrain.parallel.account import StageShare
from meshtrain.planning.machine import Machine
from meshtrain.planning.names import gib, ranks_named, shown_seconds
from meshtrain.planning.needs import Needs
from meshtrain.planning.speed.step_time import StepTime
from meshtrain.planning.verdict import Verdict
from meshtrain.training.resolve import ResolvedRun


@dataclass(frozen=True)
class Sizing:
    """A run on a machine.

    Attributes:
        resolved: the run.
        machine: of each process.
        needs: of its processes.
        verdict: whether they fit.
        advice: what makes it fit; empty if it fits.
    """

    resolved: ResolvedRun
    machine: Machine
    needs: Needs
    verdict: Verdict
    advice: str

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return Path(self.resolved.config.run_directory).name

    @cached_property
    def shares(self) -> list[StageShare]:
        """Return what each stage holds."""
        resolved = self.resolved
        return resolved.shares()

    def key_figures(self) -> dict[str, str]:
        """Return the most important values by name."""
        plan, batch = self.resolved.plan, self.resolved.batch
        spare = gib(abs(self.verdict.spare_bytes))
        found = {
            "fits": f"yes, {spare} GiB left" if self.verdict.fits else f"no, {spare} GiB missing",
            "peak memory": f"{gib(self.needs.peak_bytes)} GiB",
            "machine": self.machine.name,
            "mesh": plan.mesh.described(),
            "processes": f"{plan.mesh.world_size:,}",
            "model": type(self.resolved.model).__name__,
            "parameters": f"{self.resolved.model.num_parameters():,}",
            "tokens per step": f"{batch.global_batch_size * batch.sequence_length:,}",
        }
        if plan.mesh.pp > 1:
            found["schedule"] = plan.pipeline.schedule
        if self.needs.time is None:
            return found
        found |= _speed(self.needs.time, plan.mesh.world_size)
        return found | ({"bubble": f"{self.needs.time.replay.bubble:.1%}"} if plan.mesh.pp > 1 else {})

    @property
    def fullest_name(self) -> str:
        """Return the name of the processes that need the most memory."""
        return ranks_named(self.needs.ranks(self.needs.fullest))


def _speed(time: StepTime, world_size: int) -> dict[str, str]:
    return {
        "time of a step": f"{shown_seconds(time.seconds)} s",
        "tokens/s": f"{time.tokens_per_second * world_size:,.0f}",
        "tokens/s per process": f"{time.tokens_per_second:,.0f}",
        "MFU": f"{time.mfu:.1%}",
    }
