"""The plans that people usually take, and why another one is faster."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from meshtrain.planning.machine import Machine
from meshtrain.planning.names import gib
from meshtrain.planning.search.candidates import Candidate
from meshtrain.planning.search.estimate import Estimate
from meshtrain.planning.search.ranking import Found


def usual_plans(estimates: Mapping[Candidate, Estimate], limit_bytes: float, on_host: int) -> dict[str, Candidate]:
    """Return name -> the best candidate of each usual kind; one that fits if there is one.

    Args:
        estimates: of all candidates.
        limit_bytes: of a process.
        on_host: number of processes on a host.
    """
    found = {}
    for name, belongs in _usual_kinds(on_host).items():
        ours = sorted(filter(belongs, estimates), key=lambda it: estimates[it].seconds)
        fitting = (it for it in ours if estimates[it].peak_bytes <= limit_bytes)
        if ours:
            found[name] = next(fitting, None) or min(ours, key=lambda it: estimates[it].peak_bytes)
    return found


def _usual_kinds(on_host: int) -> dict[str, Callable[[Candidate], bool]]:
    """Return name -> whether a candidate is of that kind."""
    return {
        "copies (DDP)": lambda it: it.pp == it.tp == it.dp_shard == 1,
        "FSDP alone": lambda it: it.pp == it.tp == it.dp_replicate == 1,
        "FSDP and tp on each host": lambda it: it.pp == it.dp_replicate == 1 and it.tp == on_host > 1,
        "1F1B without tp": lambda it: it.pp > 1 and it.tp == 1 and it.schedule == "1F1B",
        "1F1B, tp on each host": lambda it: it.pp > 1 and it.tp == on_host > 1 and it.schedule == "1F1B",
    }


def other_kinds(usual: Mapping[str, Candidate], winner: Candidate, on_host: int) -> dict[str, Candidate]:
    """Return the usual plans without the kind of the winner."""
    kinds = _usual_kinds(on_host)
    return {name: it for name, it in usual.items() if not kinds[name](winner)}


def variants(winner: Candidate) -> dict[str, Candidate]:
    """Return what differs from the winner in one setting that people often ask about."""
    found = {}
    if winner.recompute != "none":
        found["without recomputation"] = replace(winner, recompute="none")
    else:
        found["with full recomputation"] = replace(winner, recompute="full")
    if winner.pp > 1 and winner.schedule != "1F1B":
        found["with 1F1B"] = replace(winner, schedule="1F1B", stages_per_rank=1)
    return found


def reason(loser: Found, winner: Found, machine: Machine) -> str:
    """Return why a plan loses, in words."""
    if not loser.fits:
        lacking = machine.with_fragmentation(loser.use.peak_bytes) - machine.memory_bytes
        role, size = max(loser.use.at_peak.items(), key=lambda item: item[1])
        return f"needs {gib(lacking)} GiB too much; the largest part is {role}, {gib(size)} GiB"
    slower = loser.time.seconds / winner.time.seconds - 1
    here, there = _parts(winner), _parts(loser)
    name = max(there, key=lambda part: there[part] - here.get(part, 0.0))
    more = there[name] - here.get(name, 0.0)
    return f"{slower:+.1%} seconds; {name} takes {more:,.3g} s more" if more > 0 else f"{slower:+.1%} seconds"


def estimated_reason(loser: Estimate, winner: Estimate, machine: Machine) -> str:
    """Return why a plan loses that was not simulated, from what both need in closed form."""
    lacking = machine.with_fragmentation(round(loser.peak_bytes)) - machine.memory_bytes
    if lacking > 0:
        return f"estimated: needs about {gib(lacking)} GiB too much"
    slower = loser.seconds / winner.seconds - 1
    # Estimates do not tell apart what is about as fast.
    return f"estimated: about {slower:+.0%} seconds" if slower > 0.01 else "estimated about as fast, not simulated"


def _parts(found: Found) -> dict[str, float]:
    """Return where the seconds of a step go."""
    step = found.time.replay
    waits = step.bubble * step.seconds
    exposed = {
        f"waiting for messages over {axis}": it.exposed_seconds for axis, it in step.axes.items() if axis != "pp"
    }
    computing = step.seconds - waits - sum(exposed.values())
    return {"waiting for other stages": waits, "computing": computing, **exposed}
