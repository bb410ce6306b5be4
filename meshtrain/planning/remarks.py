"""Sentences about what each process needs. The screen and the page show the same ones."""

from meshtrain.planning.machine import Machine
from meshtrain.planning.names import gib, shown_seconds
from meshtrain.planning.needs import Needs
from meshtrain.training.resolve import ResolvedRun

ONE_DOCUMENT = (
    "Each sequence is assumed to be one document, because no data is read. Attention of shorter ones takes less time, "
    "and 'eager' less memory."
)
UNCOMPILED = "Layers are simulated without compilation, which changes what they keep."


def host_remark(needs: Needs) -> str:
    """Return how much host memory is needed; empty without offloading."""
    host = max(use.host_bytes for use in needs.uses)
    return f"In host memory are up to {gib(host)} GiB of each process." if host else ""


def time_remark(needs: Needs, machine: Machine) -> str:
    """Return how long a step takes, or that this is not known."""
    time = needs.time
    if time is None:
        return f"How long a step takes is not known: {machine.name} has no table [speed]."
    bubble = f", {time.replay.bubble:.1%} of it waiting for other stages" if len(needs.simulation.programs) > 1 else ""
    return (
        f"A step takes {shown_seconds(time.seconds)} s{bubble}: {time.tokens_per_second:,.0f} tokens per second and "
        f"process, MFU {time.mfu:.1%} of {time.peak_tflops:,.4g} TFLOP/s."
    )


def estimates_remark(machine: Machine) -> str:
    """Return which constants of the speed were not measured; empty if all were."""
    names = [name.removeprefix("speed.") for name in machine.estimates() if name.startswith("speed.")]
    return f"From datasheets or assumed, not measured: {', '.join(names)}." if names else ""


def documents_remark(resolved: ResolvedRun) -> str:
    """Return what is assumed about documents; empty unless attention computes each one alone."""
    return ONE_DOCUMENT if resolved.plan.attention.documents == "segments" else ""


def compilation_remark(resolved: ResolvedRun) -> str:
    """Return what compilation changes; empty without it."""
    return UNCOMPILED if resolved.plan.compile.enabled else ""
