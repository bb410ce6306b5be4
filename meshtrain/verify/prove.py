"""A proof: train the stock model in one process and the plan on local ranks, and compare."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils import logging

from meshtrain import console
from meshtrain.config.mesh import MeshPlan
from meshtrain.errors import ModelError, TrainingStopped, UserError
from meshtrain.runtime.fork_server import preload
from meshtrain.runtime.ranks import RankError, run_on_ranks
from meshtrain.verify.case import ProofCase, Trace
from meshtrain.verify.compare import TOLERANCE, Finding, are_watched, compare, first_divergent_layer
from meshtrain.verify.parallel import initial_weights, train_plan
from meshtrain.verify.reference import given_weights, train_stock
from meshtrain.verify.rounding import may_be_rounding, measure_rounding

SECONDS = 300.0
VERBOSITY = "TRANSFORMERS_VERBOSITY"


@dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        architecture: class of the model.
        mesh: of the ranks.
        findings: the largest error of every kind of value.
        divergent: FQN of the first decoder layer whose output differs, if any does.
        watched: whether the output of any decoder layer was compared.
    """

    architecture: str
    mesh: MeshPlan
    findings: tuple[Finding, ...]
    divergent: str | None
    watched: bool = True

    @property
    def holds(self) -> bool:
        """Whether the plan computes what one device computes."""
        return self.difference is None

    @property
    def difference(self) -> str | None:
        """The largest difference, as text; None if the plan computes what one device computes."""
        # Findings that hold are left out first: with a tolerance of 0 an error of any size is
        # wrong.
        wrong = [finding for finding in self.findings if not finding.holds]
        if wrong:
            worst = max(wrong, key=lambda finding: finding.error / (finding.tolerance or TOLERANCE))
            return f"{worst.what} by {worst.error:.0e} at {worst.where}" if worst.where else worst.what
        return f"the output of {self.divergent}" if self.divergent is not None else None


@contextmanager
def quiet_ranks() -> Iterator[None]:
    """Start ranks with everything imported, and silence transformers, while the block runs."""
    preload(["meshtrain.verify.parallel", "meshtrain.verify.reference", "meshtrain.verify.dropout"])
    verbosity, is_set = logging.get_verbosity(), VERBOSITY in os.environ
    logging.set_verbosity_error()
    os.environ.setdefault(VERBOSITY, "error")
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if not is_set:
            del os.environ[VERBOSITY]


@quiet_ranks()
def prove(case: ProofCase) -> Proof:
    """Train both sides, compare them, and return the proof.

    Raises:
        UserError: for a model or a plan that the ranks refuse, or that they cannot run.
    """
    try:
        return prove_together([case])[0]
    except RankError as error:
        mesh = case.plan.mesh
        if isinstance(error.original, TrainingStopped):
            # Training stopped itself, which the stock model never does.
            return Proof(
                case.architecture,
                mesh,
                (Finding(str(error.original), "", math.inf, TOLERANCE),),
                None,
                watched=False,
            )
        if isinstance(error.original, UserError):
            raise error.original from error
        reason = str(error).strip().splitlines()[-1]
        raise ModelError(f"{case.architecture} cannot be proven, its tiny copy does not run: {reason}") from error


def prove_together(cases: Sequence[ProofCase]) -> list[Proof]:
    """Prove several cases on the same mesh in the same processes, one after the other.

    Raises:
        RankError: if any of them fails; `prove` for each one shows which.
    """
    mesh = cases[0].plan.mesh
    world_size = mesh.world_size
    timeout = SECONDS * len(cases)
    (stock,) = run_on_ranks(1, _one_device, cases, timeout=timeout)
    # Each tensor would use a file descriptor, and a new process can receive only a few.
    initials = [{name: value.numpy() for name, value in initial.items()} for initial, _ in stock]
    by_rank = run_on_ranks(world_size, _train_each, train_plan, cases, initials, timeout=timeout)
    return [
        _proof(case, initial, traces, expected)
        for case, initial, (_, expected), traces in zip(cases, initials, stock, zip(*by_rank, strict=True), strict=True)
    ]


def _proof(case: ProofCase, initial: dict[str, NDArray[Any]], traces: Sequence[Trace], expected: Trace) -> Proof:
    findings = compare(traces, expected)
    if may_be_rounding(findings):
        findings = compare(traces, expected, tolerances=measure_rounding(case, initial, seconds=SECONDS))
    return Proof(
        case.architecture,
        case.plan.mesh,
        tuple(findings),
        first_divergent_layer(traces, expected),
        are_watched(traces, expected),
    )


def show_proof(proof: Proof) -> None:
    """Print a proof as a table and a verdict."""
    rows = [(f.what, f.where, _shown(f.error), _shown(f.tolerance), "yes" if f.holds else "NO") for f in proof.findings]
    rows.append(("first divergent layer", *_shown_layer(proof)))
    console.table(proof.mesh.described(), ("compared", "where the error is largest", "error", "allowed", "holds"), rows)
    verdict = "computes" if proof.holds else "does NOT compute"
    console.line(f"{proof.architecture}: {proof.mesh.described()} {verdict} what one device computes")


def write_json(proofs: Sequence[Proof], path: Path) -> None:
    """Write proofs as a JSON list, in the order in which they were made."""
    path.write_text(json.dumps([_as_table(proof) for proof in proofs], indent=2) + "\n")


def _one_device(cases: Sequence[ProofCase]) -> list[tuple[dict[str, Tensor], Trace]]:
    found = []
    for case in cases:
        initial = given_weights(case) if case.pretrained else initial_weights(case)
        found.append((initial, train_stock(case, initial)))
    return found


def _train_each(
    train: Callable[[ProofCase, dict[str, Tensor]], Trace],
    cases: Sequence[ProofCase],
    initials: Sequence[dict[str, NDArray[Any]]],
) -> list[Trace]:
    return [
        train(case, {name: torch.from_numpy(value) for name, value in initial.items()})
        for case, initial in zip(cases, initials, strict=True)
    ]


def _shown_layer(proof: Proof) -> tuple[str, str, str, str]:
    if not proof.watched:
        return "not watched", "", "", ""
    return proof.divergent or "none", "", "", "NO" if proof.divergent else "yes"


def _shown(error: float) -> str:
    return "0" if error == 0 else f"{error:.1e}"


def _as_table(proof: Proof) -> dict[str, Any]:
    # JSON has no infinity, so null stands for it.
    findings = [
        {**asdict(finding), "error": finding.error if math.isfinite(finding.error) else None, "holds": finding.holds}
        for finding in proof.findings
    ]
    return {
        "architecture": proof.architecture,
        "mesh": proof.mesh.model_dump(),
        "proven": proof.holds,
        "first_divergent_layer": proof.divergent,
        "layers_watched": proof.watched,
        "findings": findings,
    }
