"""Why a plan loses against the fastest one, in words."""

from meshtrain.planning.machine import Machine
from meshtrain.planning.names import gib
from meshtrain.planning.search.estimate import Estimate
from meshtrain.planning.search.ranking import Found


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
