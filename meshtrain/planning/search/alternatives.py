"""The plans that people usually take, and those that differ little from another one."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from meshtrain.planning.search.candidates import Candidate
from meshtrain.planning.search.estimate import Estimate


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
        "copies (DDP)": lambda it: it.pp == it.tp == it.sharding_degree == 1,
        "FSDP alone": lambda it: it.pp == it.tp == it.dp_replicate == it.ep == it.cp == 1,
        "FSDP and ep": lambda it: it.pp == it.tp == it.dp_replicate == it.cp == 1 < it.ep,
        "FSDP and cp": lambda it: it.pp == it.tp == it.dp_replicate == it.ep == 1 < it.cp,
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
    if winner.tp > 1:
        name = "with whole logits" if winner.loss_parallel else "with loss parallelism"
        found[name] = replace(winner, loss_parallel=not winner.loss_parallel)
    if winner.pp > 1 and winner.schedule != "1F1B":
        found["with 1F1B"] = replace(winner, schedule="1F1B", stages_per_rank=1)
    return found
