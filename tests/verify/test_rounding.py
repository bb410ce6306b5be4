"""Rounding that a model amplifies is allowed, and real errors are not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from numpy.typing import NDArray

from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan
from meshtrain.models.tiny import default_config
from meshtrain.verify import prove, rounding
from meshtrain.verify.case import ProofCase, Trace
from meshtrain.verify.compare import TOLERANCE, Finding, compare
from meshtrain.verify.reference import given_weights, train_stock
from meshtrain.verify.rounding import LARGEST, may_be_rounding, tolerances_of
from meshtrain.verify.verify_run import make_case


def case_of(model_type: str) -> ProofCase:
    mesh = MeshPlan(dp_shard=1)
    return make_case(default_config(model_type), ParallelPlan(mesh=mesh), mesh, attention="eager", pretrained=True)


def as_arrays(case: ProofCase) -> dict[str, NDArray[Any]]:
    return {name: value.numpy() for name, value in given_weights(case).items()}


def with_wrong_gradient(trace: Trace, name: str, error: float, step: int) -> Trace:
    """Return a trace with an error in one element of a gradient, relative to the largest."""
    wrong = copy.deepcopy(trace)
    gradient = wrong.gradients[step][name]
    gradient.flatten()[0] += error * gradient.abs().max()
    return wrong


def wrong_kinds(trace: Trace, expected: Trace, tolerances: dict[str, float]) -> list[str]:
    return [finding.what for finding in compare([trace], expected, tolerances=tolerances) if not finding.holds]


def test_model_that_amplifies_rounding_differs_from_its_neighbor() -> None:
    case = case_of("cpmant")
    initial = given_weights(case)
    expected, neighbor = train_stock(case, initial), train_stock(case, initial, neighbor=17)
    assert "gradient" in wrong_kinds(neighbor, expected, {})
    assert may_be_rounding(compare([neighbor], expected))
    tolerances = tolerances_of(case, as_arrays(case))
    assert TOLERANCE < tolerances["gradient"] <= LARGEST
    assert wrong_kinds(neighbor, expected, tolerances) == []
    # What the model does not amplify is still exact, and no error hides behind an earlier step.
    for step in range(len(expected.gradients)):
        name = max(expected.gradients[step], key=lambda n: expected.gradients[step][n].abs().max())
        assert wrong_kinds(with_wrong_gradient(neighbor, name, 1e-8, step), expected, tolerances) == ["gradient"]


def test_other_models_have_the_usual_tolerance() -> None:
    case = case_of("llama")
    tolerances = tolerances_of(case, as_arrays(case))
    assert set(tolerances.values()) == {TOLERANCE}
    expected = train_stock(case, given_weights(case))
    name = next(iter(expected.gradients[0]))
    assert wrong_kinds(with_wrong_gradient(expected, name, 1e-11, 0), expected, tolerances) == ["gradient"]


@pytest.mark.parametrize(
    ("errors", "expected"),
    [([1e-11, 0.0], True), ([1e-11, 1e-8], False), ([1e-13, 0.0], False), ([float("inf")], False)],
)
def test_only_small_errors_may_be_rounding(errors: list[float], expected: bool) -> None:
    assert may_be_rounding([Finding("loss", "", error, TOLERANCE) for error in errors]) is expected


def test_different_initial_weights_are_never_rounding() -> None:
    assert not may_be_rounding([Finding("initial weights", "", 1e-15, 0.0)])


def test_rounding_is_measured_only_for_a_small_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    case, measured = case_of("llama"), []

    def run_here(world_size: int, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        measured.append(world_size)
        return [function(*args)]

    monkeypatch.setattr(rounding, "run_on_ranks", run_here)
    initial = given_weights(case)
    expected = train_stock(case, initial)
    for error, difference, runs in (
        (0.0, "None", []),
        (1e-10, "gradient by 1e-10", [1]),
        (1e-6, "gradient by 1e-06", [1]),
    ):
        trace = with_wrong_gradient(expected, next(iter(initial)), error, 0)
        proof = prove._proof(case, as_arrays(case), [trace], expected)
        assert str(proof.difference).startswith(difference)
        assert measured == runs
