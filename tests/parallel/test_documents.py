"""Packed documents compute what each document alone does, without a mask of all pairs of a row."""

from typing import Any

import pytest

from meshtrain.verify.case import ProofCase
from tests.parallel.test_context import GATHERED, assert_proven, case_of


def segments_of(model_type: str, mesh: dict[str, int], attention: str = "sdpa", **tables: Any) -> ProofCase:
    case = case_of(model_type, mesh, "separate", attention=attention, **tables)
    assert case.plan.attention.documents == "segments"
    return case


def test_documents_alone_compute_what_one_process_does() -> None:
    assert_proven(
        [
            segments_of("llama", {}),
            segments_of("llama", {}, recompute={"mode": "full"}),
            segments_of("llama", {}, recompute={"mode": "selective"}),
            segments_of("llama", {}, compile={"enabled": True}),
            segments_of("llama", {}, compile={"enabled": True}, recompute={"mode": "full"}),
            segments_of("llama", {}, compile={"enabled": True}, recompute={"mode": "selective"}),
            segments_of("qwen3", {}),
            segments_of("gpt2", {}),
            segments_of("mistral", {}),
            segments_of("gemma2", {}, "eager"),
            segments_of("gemma3_text", {}),
            segments_of("llama4_text", {}),
            segments_of("gpt_oss", {}, "eager"),
            segments_of("deepseek_v3", {}),
            segments_of("mixtral", {}, config={"output_router_logits": True}),
        ]
    )


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}, {"dp_shard": 2}, {"cp": 2}], ids=str)
def test_documents_alone_on_a_mesh_compute_what_one_process_does(mesh: dict[str, int]) -> None:
    recomputed = {"recompute": {"mode": "full"}}
    cases = [segments_of("llama", mesh), segments_of("gemma3_text", mesh, **recomputed)]
    if "tp" in mesh:
        cases += [segments_of("qwen3", mesh, tensor={"sequence_parallel": True})]
    if "cp" in mesh:
        cases += [
            segments_of(kind, mesh, attention, context=context)
            for kind, attention in (("llama4_text", "sdpa"), ("gpt_oss", "eager"), ("mistral", "sdpa"))
            for context in (GATHERED, {"method": "all_gather", "order": "contiguous"}, {"method": "ulysses"})
        ]
    assert_proven(cases)
