"""Head and loss in chunks train the stock classes like one process, whatever their heads do."""

import pytest

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import LossPlan, ParallelPlan
from meshtrain.config.run import ModelConfig
from meshtrain.models.build import load_hf_config
from meshtrain.verify.case import ProofCase
from meshtrain.verify.prove import prove_together, quiet_ranks
from meshtrain.verify.verify_run import make_case

# Scales and caps have values that change logits.
FAMILIES: dict[str, dict[str, object]] = {
    "gpt2": {},
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {},
    "mistral": {},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {"logits_scaling": 4.0},
    "phi": {},
    "phi3": {},
    "opt": {},
    "bloom": {},
    "gpt_neox": {},
    "gptj": {},
    "falcon": {},
    "mixtral": {"output_router_logits": True},
    "qwen3_moe": {"output_router_logits": True},
    "olmo": {},
    "olmo2": {},
    "starcoder2": {},
    "stablelm": {},
    "mpt": {},
    "deepseek_v3": {},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "minicpm3": {},
    "bert": {"is_decoder": True},
    "exaone4": {},
    "glm4": {},
    "smollm3": {},
    "xglm": {},
    "biogpt": {},
}
SPECIAL = ("gemma2", "cohere", "granite", "opt", "bert")


def case_of(kind: str, mesh: dict[str, int]) -> ProofCase:
    plan = with_family(ParallelPlan(loss=LossPlan(chunk_tokens=5)), kind)
    hf_config = load_hf_config(ModelConfig(type=kind, config=FAMILIES[kind]))
    return make_case(hf_config, plan, MeshPlan(**{"dp_shard": 1, **mesh}), attention="eager")


def prove_families(kinds: list[str], mesh: dict[str, int]) -> None:
    cases = [case_of(kind, mesh) for kind in kinds]
    assert all(case.plan.loss.size == 5 for case in cases)
    with quiet_ranks():
        proofs = prove_together(cases)
    assert {kind: proof.difference for kind, proof in zip(kinds, proofs, strict=True) if not proof.holds} == {}


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}], ids=["tp", "pp", "fsdp"])
def test_special_heads_train_in_chunks_like_one_process(mesh: dict[str, int]) -> None:
    prove_families([*SPECIAL], mesh)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}], ids=["tp", "pp", "fsdp"])
def test_other_heads_train_in_chunks_like_one_process(mesh: dict[str, int]) -> None:
    prove_families([kind for kind in FAMILIES if kind not in SPECIAL], mesh)
