"""Whether every process of a run fits a machine."""

from dataclasses import dataclass

from meshtrain.planning.machine import Machine
from meshtrain.planning.names import gib, ranks_named
from meshtrain.planning.needs import Needs


@dataclass(frozen=True)
class Verdict:
    """Whether every process fits.

    Attributes:
        spare_bytes: that are left there; negative if it does not fit.
        sentence: that says so.
        besides: what was counted besides tensors, in a sentence; empty if nothing was.
    """

    spare_bytes: int
    sentence: str
    besides: str

    @property
    def fits(self) -> bool:
        """Return whether every process fits."""
        return self.spare_bytes >= 0


def verdict(needs: Needs, machine: Machine) -> Verdict:
    """Return whether every process fits."""
    use, ranks = needs.uses[needs.fullest], needs.ranks(needs.fullest)
    spare = machine.memory_bytes - machine.with_fragmentation(use.peak_bytes)
    who = f"{ranks_named(ranks)} {'needs' if len(ranks) == 1 else 'need'}"
    if spare >= 0:
        sentence = f"It fits {machine.name}: {who} the most, and {gib(spare)} GiB are left."
    else:
        role, size = max(use.at_peak.items(), key=lambda item: item[1])
        sentence = f"It does not fit {machine.name}: {who} {gib(-spare)} GiB more. The largest part is {role}, "
        sentence += f"{gib(size)} GiB."
    return Verdict(spare, sentence, _besides(machine))


def _besides(machine: Machine) -> str:
    config = machine.config
    if not (config.reserved_gib or config.fragmentation):
        return ""
    known = "Assumed, not measured" if "reserved_gib" in config.not_measured() else "Besides tensors"
    return (
        f"{known}: {config.reserved_gib:g} GiB for CUDA and NCCL, and {config.fragmentation:.0%} of the peak that "
        "torch's allocator holds in pieces."
    )
