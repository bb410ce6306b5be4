"""Classes of many kinds, over cp and ep beside other axes, compute what one process computes."""

from typing import Any

import pytest

from meshtrain.verify.case import ProofCase
from tests.parallel.test_context import CONTIGUOUS, GATHERED, assert_proven, case_of

# Eight processes on two cores take minutes.
pytestmark = pytest.mark.timeout(1200)
# Learned positions, windows, softcaps, sinks, and routers.
OVER_CP = ("gpt2", "llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "qwen3_moe")
OVER_EP = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
EAGER = ("gemma2", "gpt_oss")
ROWS = ("separate", "padded")
BESIDE: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}]
SPLIT: dict[str, Any] = {"tensor": {"sequence_parallel": True}}
FULL: dict[str, Any] = {"recompute": {"mode": "full"}}


def cases_of(model_type: str, mesh: dict[str, int], **tables: Any) -> list[ProofCase]:
    attention = "eager" if model_type in EAGER else "sdpa"
    return [case_of(model_type, mesh, rows, attention=attention, **tables) for rows in ROWS]


@pytest.mark.parametrize("model_type", OVER_CP)
@pytest.mark.parametrize("cp", [2, 4])
def test_parts_of_sequences_compute_what_one_process_does(cp: int, model_type: str) -> None:
    ways: list[dict[str, Any]] = [{}, {"context": CONTIGUOUS}, {"context": GATHERED, **FULL}]
    assert_proven([case for way in ways for case in cases_of(model_type, {"cp": cp}, **way)])


@pytest.mark.parametrize("model_type", OVER_EP)
@pytest.mark.parametrize("ep", [2, 4])
def test_experts_on_several_processes_compute_what_one_process_does(ep: int, model_type: str) -> None:
    assert_proven([case for way in ({}, FULL) for case in cases_of(model_type, {"ep": ep}, **way)])


@pytest.mark.parametrize(
    ("model_type", "axis"), [*((it, "cp") for it in OVER_CP), *((it, "ep") for it in OVER_EP)], ids=str
)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("other", BESIDE, ids=str)
def test_beside_another_axis_they_compute_what_one_process_does(
    other: dict[str, int], degree: int, model_type: str, axis: str
) -> None:
    mesh = {axis: degree, **other}
    tables = FULL | ({"context": GATHERED} if axis == "cp" else {})
    cases = [*cases_of(model_type, mesh), *cases_of(model_type, mesh, **tables)]
    assert_proven([*cases, *(cases_of(model_type, mesh, **tables, **SPLIT) if "tp" in mesh else [])])
