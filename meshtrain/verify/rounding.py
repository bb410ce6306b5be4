"""How much rounding alone changes the results of the stock model.

Some models amplify rounding: scores of attention that are large, for example. Another order of a
sum then changes a gradient by more than the tolerance of a proof. The stock model shows by how
much: it is trained once more from neighbors of its weights, in which each weight is the next number
above or below. No computation in float64 can be more precise than that.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from meshtrain.runtime.ranks import run_on_ranks
from meshtrain.verify.case import ProofCase
from meshtrain.verify.compare import TOLERANCE, Finding, compare
from meshtrain.verify.reference import train_stock

NEIGHBORS = 3
# A plan rounds in each operation, and a neighbor in its weights only.
FACTOR = 10.0
# Whatever the model, a larger error is wrong.
LARGEST = 1e-9


def may_be_rounding(findings: Sequence[Finding]) -> bool:
    """Return whether all that is wrong is so small that it may be rounding."""
    wrong = [finding for finding in findings if not finding.holds]
    return bool(wrong) and all(finding.tolerance and finding.error <= LARGEST for finding in wrong)


def measure_rounding(case: ProofCase, initial: Mapping[str, NDArray[Any]], *, seconds: float) -> dict[str, float]:
    """Return kind of value -> the error that is allowed, in a process of its own.

    Args:
        case: to prove.
        initial: stock FQN -> value, for every parameter.
        seconds: until the process is ended.
    """
    (tolerances,) = run_on_ranks(1, tolerances_of, case, initial, timeout=seconds)
    return tolerances


def tolerances_of(case: ProofCase, initial: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Return kind of value -> the error that is allowed."""
    weights = {name: torch.from_numpy(value) for name, value in initial.items()}
    expected = train_stock(case, weights)
    neighbors = [train_stock(case, weights, neighbor=number) for number in range(1, NEIGHBORS + 1)]
    # All steps are compared, although the first one may differ.
    found = compare(neighbors, expected, tolerances={"gradient": math.inf})
    return {finding.what: max(TOLERANCE, min(LARGEST, FACTOR * finding.error)) for finding in found}
