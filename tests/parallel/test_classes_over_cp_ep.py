"""Classes of many kinds, over cp and ep beside other axes, compute what one process computes."""

from typing import Any

import pytest

from meshtrain.verify.case import ProofCase
from tests.parallel.test_context import CONTIGUOUS, GATHERED, assert_proven, case_of

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


def beside_each_axis(model_type: str, mesh: dict[str, int], **tables: Any) -> list[ProofCase]:
    cases = [case for other in BESIDE for case in cases_of(model_type, {**mesh, **other}, **tables)]
    return [*cases, *cases_of(model_type, {**mesh, "tp": 2}, **tables, **SPLIT)]


@pytest.mark.parametrize("model_type", OVER_CP)
def test_parts_of_sequences_compute_what_one_process_does(model_type: str) -> None:
    ways: list[dict[str, Any]] = [{}, {"context": CONTIGUOUS}, {"context": GATHERED, **FULL}]
    assert_proven([case for way in ways for case in cases_of(model_type, {"cp": 2}, **way)])
    alone = [case for way in ways for case in cases_of(model_type, {"cp": 4}, **way)]
    assert_proven(
        [*alone, *beside_each_axis(model_type, {"cp": 2}), *beside_each_axis(model_type, {"cp": 2}, **ways[2])]
    )
    assert_proven(beside_each_axis(model_type, {"cp": 4}, context=GATHERED))


@pytest.mark.parametrize("model_type", OVER_EP)
def test_experts_on_several_processes_compute_what_one_process_does(model_type: str) -> None:
    ways: list[dict[str, Any]] = [{}, FULL]
    assert_proven([case for way in ways for case in cases_of(model_type, {"ep": 2}, **way)])
    alone = [case for way in ways for case in cases_of(model_type, {"ep": 4}, **way)]
    two = [case for way in ways for case in beside_each_axis(model_type, {"ep": 2}, **way)]
    assert_proven([*alone, *two])
    assert_proven(beside_each_axis(model_type, {"ep": 4}))
