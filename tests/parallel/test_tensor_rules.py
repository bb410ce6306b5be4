"""Derived tensor rules: each model type trains over tp like its stock model in one process."""

import ast
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import meshtrain
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, Style
from meshtrain.errors import ModelError, PlanError
from meshtrain.models.build import build_meta_model
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.pipeline import full_tensor
from meshtrain.parallel.tensor.derive import with_derived_rules
from meshtrain.parallel.tensor.rules import TensorRules
from meshtrain.parallel.tensor.split_flow import BATCH, PART, CannotSplitError, SeesUses
from meshtrain.parallel.tensor.styles import STYLES
from meshtrain.runtime.mesh import init_mesh
from tests.parallel.families import VOCABULARY, Family, errors_of, resolve_family
from tests.ranks import run_on_ranks

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
GLM = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
CODEGEN = {"num_attention_heads": 8, "rotary_dim": 4}
INKLING = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse"],
}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48}
OLD_FALCON = {"multi_query": False, "parallel_attn": False, "alibi": True, "num_kv_heads": 4, "ffn_hidden_size": 48}
FAMILIES = [
    Family("phi3"),
    Family("phi3", {"num_key_value_heads": 1}),
    Family("gpt_neox"),
    Family("gemma2"),
    Family("bloom"),
    Family("falcon", {"ffn_hidden_size": 48}),
    Family("falcon", {"ffn_hidden_size": 48, "alibi": True}),
    Family("falcon", NEW_FALCON),
    Family("falcon", OLD_FALCON),
    Family("opt"),
    Family("gptj"),
    Family("mpt"),
    Family("gpt_bigcode", {"num_key_value_heads": 1}),
    Family("gpt_bigcode", {"multi_query": False}),
    Family("codegen", CODEGEN),
    Family("stablelm", {"num_key_value_heads": 1}),
    Family("persimmon"),
    Family("biogpt"),
    Family("hunyuan_v1_dense"),
    Family("gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
    Family("cohere"),
    Family("llama", {"num_key_value_heads": 1}),
    Family("qwen3", {"num_key_value_heads": 1}),
    # As many heads as features in a head.
    Family("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 64}),
    Family("gpt2", {"num_attention_heads": 3, "hidden_size": 24}),
]
# Options of configurations that change the operators around the heads.
FLAGS = [
    Family("glm4_moe", {**GLM, "use_qk_norm": True}),
    Family("phi", {"qk_layernorm": True}),
    Family("cohere", {"use_qk_norm": True}),
    Family("cohere", {"use_qk_norm": True, "num_key_value_heads": 1}),
    Family("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    Family("stablelm", {"qk_layernorm": True, "num_key_value_heads": 1}),
    Family("apertus"),
    Family("phi", {"qk_layernorm": True}, {"sequence_parallel": True}),
    Family("cohere", {"use_qk_norm": True}, {"sequence_parallel": True}),
    Family("stablelm", {"qk_layernorm": True}, {"sequence_parallel": True}),
]
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOES = [
    *(Family("mixtral", MIXTRAL, {"experts": experts}) for experts in ("tensor", "expert")),
    *(Family("qwen3_moe", {**EXPERTS, "num_experts": 4}, {"experts": experts}) for experts in ("tensor", "expert")),
    *(Family("deepseek_v3", DEEPSEEK, {"experts": experts}) for experts in ("tensor", "expert")),
    Family("deepseek_v2", DEEPSEEK),
    Family("granite_swa"),
    *(Family("gpt_oss", GPT_OSS, {"experts": experts}) for experts in ("tensor", "expert")),
    Family("inkling_text", INKLING),
]
# With the experts implementation of runs, routing to other processes is skipped, not looped.
GROUPED = [
    Family(model_type, config, {"experts": experts}, implementation, "float32")
    for model_type, config in (
        ("mixtral", MIXTRAL),
        ("qwen3_moe", {**EXPERTS, "num_experts": 4}),
        ("gpt_oss", GPT_OSS),
    )
    for experts in ("tensor", "expert")
    for implementation in ("grouped_mm", "batched_mm")
]
PARTS = {"sequence_parallel": True}
TOGETHER = [
    Family("phi3", {}, PARTS),
    Family("bloom", {}, PARTS),
    Family("falcon", OLD_FALCON, PARTS),
    Family("mixtral", MIXTRAL, {**PARTS, "experts": "expert"}),
    Family("deepseek_v2", DEEPSEEK, PARTS),
    Family("granite_swa", {}, PARTS),
    Family("gpt_oss", GPT_OSS, PARTS),
    Family("opt", {}, {"loss_parallel": False}),
]
GEMMA3N = {"num_kv_shared_layers": 0}
INPUTS_PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
COMBINED = "its layers combine a part of the sequence with the full sequence (RuntimeError: "
# Types whose hidden states between layers cannot be split by sequence. (A gemma3n, which holds a
# gemma3n_text, needs a library for images.)
NO_SEQUENCE_PARALLEL = [
    (Family("opt", {}, PARTS), "model.decoder.layers.*.fc1 has (batch * seq / tp, 32) instead of "),
    (Family("gemma3n_text", GEMMA3N, PARTS), "model.layers.* has (4, batch, seq, 32) instead of (batch, seq, hidden)"),
    (Family("gemma4", {}, PARTS), COMBINED),
    (Family("gemma4_text", {}, PARTS), COMBINED),
    (
        Family("deepseek_v4", {}, PARTS),
        "model.layers.*.self_attn has (batch, seq, 32) instead of (batch, seq / tp, hidden)",
    ),
    (Family("qwen4_exp_text", {}, PARTS), COMBINED),
    # The layer adds a bias that belongs to its attention.
    (
        Family("gpt_neox_japanese", {}, PARTS),
        "gpt_neox_japanese.layers.*.attention.dense_bias is used on a part of the sequence, outside of its module",
    ),
]
# The plan of transformers for these does not run, or changes what the model computes.
UNUSABLE = [
    Family("doge"),
    Family("inkling2_text", INKLING),
    Family("gemma3n_text", {**GEMMA3N, **INPUTS_PER_LAYER, "activation_sparsity_pattern": [0.95, 0.0]}),
]


def prove(
    families: list[Family], mesh: tuple[int, int, int, int], world_size: int, *, tolerance: float = 1e-11
) -> None:
    ranks = run_on_ranks(world_size, errors_of, families, mesh)
    for family, *errors in zip(families, *ranks, strict=True):
        worst = {name: error for part in errors for name, error in part.items() if not error < tolerance}
        assert not worst, (family, worst)


def test_the_table_has_one_row_for_each_style() -> None:
    assert sorted(STYLES) == sorted(get_args(Style))


def test_only_the_table_has_facts_about_single_styles() -> None:
    package = Path(meshtrain.__file__).parent
    # The configuration has the names, and derived rules choose among them.
    allowed = {"config/plan.py", "parallel/tensor/styles.py", "parallel/tensor/derive.py"}
    allowed |= {f"parallel/tensor/{name}.py" for name in ("dataflow/__init__", "input_blocks", "shared_heads")}
    # The names of transformers, in the plan of a class that is made.
    allowed |= {"compat/causal_head.py"}
    # A recipe of float8 is also called like a style.
    allowed |= {"parallel/float8/product.py"}
    # A setting of the plan is also called this.
    names = {*get_args(Style)} - {"sequence_parallel"}
    found = [
        f"{path.relative_to(package)}:{node.lineno}: {node.value}"
        for path in package.rglob("*.py")
        if str(path.relative_to(package)) not in allowed
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not found


@pytest.mark.parametrize(
    "families",
    [FAMILIES[:10], FAMILIES[10:], MOES, FLAGS, UNUSABLE],
    ids=["first", "second", "experts", "flags", "other plans"],
)
def test_every_family_trains_like_one_process(families: list[Family]) -> None:
    prove(families, (1, 1, 1, 2), 2)


def test_grouped_experts_train_like_one_process() -> None:
    prove(GROUPED, (1, 1, 1, 2), 2, tolerance=1e-5)


@pytest.mark.parametrize("mesh", [(2, 1, 1, 2), (1, 1, 2, 2)], ids=str)
def test_families_train_with_a_pipeline_and_with_shards(mesh: tuple[int, int, int, int]) -> None:
    prove(TOGETHER, mesh, 4)


def test_four_processes_train_with_two_key_value_heads() -> None:
    per_head = [Family("cohere", {"use_qk_norm": True}), Family("stablelm", {"qk_layernorm": True})]
    prove([Family("llama"), Family("phi3"), Family("qwen3", {}, PARTS), *per_head], (1, 1, 1, 4), 4)


GROUPED_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
ODD_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
# Heads that four processes cannot share evenly. Some need a part of a group of query heads.
UNEVEN = [
    Family("llama", GROUPED_HEADS),
    Family("llama", {**GROUPED_HEADS, "num_key_value_heads": 1}),
    Family("stablelm", {**GROUPED_HEADS, "qk_layernorm": True}, PARTS),
    Family("deepseek_v3", {**DEEPSEEK, "num_attention_heads": 6, "num_key_value_heads": 6}),
    Family("gpt2", {"hidden_size": 48, "num_attention_heads": 6}, PARTS),
    Family("bloom", {"hidden_size": 48, "num_attention_heads": 6}),
    Family("qwen3", GROUPED_HEADS, PARTS),
    Family("phi3", GROUPED_HEADS, PARTS),
    Family("mixtral", {**MIXTRAL, **GROUPED_HEADS}),
    Family("cohere", {**GROUPED_HEADS, "use_qk_norm": True}),
    Family("falcon", {"hidden_size": 48, "num_attention_heads": 6, "ffn_hidden_size": 48}),
    Family("gpt_bigcode", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 1}),
    Family("bert", {"is_decoder": True, "hidden_size": 48, "num_attention_heads": 6}),
]


@pytest.mark.parametrize("families", [UNEVEN[:6], UNEVEN[6:]], ids=["first", "second"])
def test_four_processes_train_with_uneven_heads(families: list[Family]) -> None:
    prove(families, (1, 1, 1, 4), 4)


def test_uneven_heads_train_with_a_pipeline_and_with_shards() -> None:
    odd = [Family("llama", ODD_HEADS, PARTS), Family("gpt_neox", ODD_HEADS)]
    prove(odd, (2, 1, 1, 2), 4)
    prove(odd, (1, 1, 2, 2), 4)


def test_other_tensors_than_hidden_states_cross_borders_over_tp() -> None:
    # The last two layers read the keys and values of the first two, of which a process has its
    # heads. RoFormer computes a table before the layers, which nothing splits.
    kinds = ["sliding_attention", "full_attention"] * 2
    shared = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": kinds, **INPUTS_PER_LAYER}
    roformer = {"is_decoder": True, "embedding_size": 32}
    prove([Family("gemma3n_text", shared), Family("roformer", roformer, PARTS)], (2, 1, 1, 2), 4)


def test_multi_query_attention_repeats_its_heads_under_sdpa() -> None:
    config = Family(
        "gpt_bigcode", {"num_attention_heads": 16, "hidden_size": 128, "num_key_value_heads": 1}
    ).hf_config()
    model = build_meta_model(config, dtype=torch.float64, attention="sdpa")
    plan = resolve_plan(ParallelPlan(mesh=MeshPlan(tp=2)), model, BatchShape(2, 1, 12), 2)
    (names,) = plan.tensor.local_attributes.values()
    assert "num_key_value_groups" in names


def test_copies_that_do_not_run_matter_only_where_rules_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("needs a kernel")

    monkeypatch.setattr("transformers.models.bloom.modeling_bloom.BloomAttention.forward", fail)
    model = build_meta_model(Family("bloom", {"vocab_size": 62}).hf_config(), dtype=torch.float64, attention="eager")
    plan = ParallelPlan(mesh=MeshPlan(dp_shard=1))
    assert not with_derived_rules(plan, model).tensor.fused
    with pytest.raises(
        ModelError, match=r"a tiny copy of BloomForCausalLM does not run \(RuntimeError: needs a kernel\)"
    ):
        with_derived_rules(plan.model_copy(update={"mesh": MeshPlan(tp=2)}), model)


def test_parameters_on_a_part_of_the_sequence_are_found() -> None:
    holder = torch.nn.Linear(8, 8, device="meta")
    part = torch.empty(BATCH, PART, 8, device="meta")
    uses = (lambda: part * holder.bias, lambda: part * (1 + holder.bias), lambda: part @ holder.weight.sigmoid())
    for use in uses:
        with SeesUses(holder, TensorRules()), pytest.raises(CannotSplitError, match="used on a part of the sequence"):
            use()
    with SeesUses(holder, TensorRules()):
        assert holder(torch.empty(BATCH, 2 * PART, 8, device="meta")).shape == (BATCH, 2 * PART, 8)


def test_blocks_of_parts_run_under_sequence_parallelism() -> None:
    family = Family("bert", {"is_decoder": True}, PARTS)
    plan, _ = resolve_family(family, (1, 1, 1, 2))
    layer = "bert.encoder.layer.*."
    assert plan.tensor.styles[f"{layer}attention.self"] == "shared_input"
    assert plan.tensor.styles[f"{layer}attention.output.LayerNorm"] == "sequence_parallel"
    assert "whole_sequence" not in plan.tensor.styles.values()
    prove([family], (1, 1, 1, 2), 2)


def test_experts_without_tensor_parallelism_train_like_one_process() -> None:
    prove([MOES[0], MOES[4]], (2, 1, 2, 1), 4)


def test_derived_rules_are_in_the_resolved_plan() -> None:
    plan, _ = resolve_family(Family("mixtral", MIXTRAL), (1, 1, 1, 2))
    assert not plan.tensor.auto
    assert plan.tensor.fused == {"model.layers.*.mlp.experts.gate_up_proj": ["gate", "up"]}
    assert plan.tensor.styles == {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn": "shared_input",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp": "whole_sequence",
        "model.layers.*.mlp.gate": "replicate",
        "model.layers.*.mlp.experts": "moe_tp_experts",
        "model.layers.*.mlp.experts.gate_up_proj": "colwise",
        "model.layers.*.mlp.experts.down_proj": "rowwise",
        "model.layers.*.input_layernorm": "sequence_parallel",
        "model.layers.*.post_attention_layernorm": "sequence_parallel",
        "model.norm": "replicate",
        "lm_head": "colwise_gather_output",
    }
    without, _ = resolve_family(Family("mixtral", MIXTRAL), (1, 1, 1, 1))
    assert without.tensor.fused == plan.tensor.fused
    assert not without.tensor.styles


@pytest.mark.parametrize(
    ("family", "tp", "message"),
    [
        (
            Family("codegen"),
            2,
            "mesh.tp = 2 does not divide the four blocks of 4 attention heads that CodeGenForCausalLM computes by; set "
            "mesh.tp to 1",
        ),
        (
            Family("mixtral", {**MIXTRAL, "num_local_experts": 3}, {"experts": "expert"}),
            2,
            "mesh.tp = 2 does not divide dimension 0 (3) of model.layers.0.mlp.experts.gate_up_proj; set mesh.tp to "
            "one of 1, 3",
        ),
        (
            Family("llama4_text", {"num_local_experts": 4}, {"experts": "expert"}),
            2,
            "tensor.styles: model.layers.*.feed_forward.experts is 'expert_parallel', but a Llama4TextExperts cannot "
            "leave out the experts of other processes; make it 'moe_tp_experts'",
        ),
    ],
)
def test_unsupported_tensor_parallelism_is_refused(family: Family, tp: int, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolve_family(family, (1, 1, 1, tp))
    assert message in caught.value.lines


@pytest.mark.parametrize(("family", "reason"), NO_SEQUENCE_PARALLEL)
def test_a_stream_that_cannot_be_split_is_refused(family: Family, reason: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolve_family(family, (1, 1, 1, 2))
    (line,) = caught.value.lines
    assert line.startswith(f"tensor.sequence_parallel: not for a {family.model_type}: {reason}"), line
    assert line.endswith("; set it to false")


@pytest.mark.parametrize(
    ("pattern", "word", "reason"),
    [
        ("mlp.up_proj", "all_reduce", "its 'all_reduce' for model.layers.*.mlp.up_proj has no meaning here"),
        ("mlp.up_proj", "rowwise", "two processes would not compute model.layers.0.mlp.up_proj as one does"),
        ("self_attn.k_proj", "replicate", "two processes would not compute CohereForCausalLM"),
    ],
)
def test_a_wrong_plan_of_transformers_is_a_note(
    capsys: pytest.CaptureFixture[str], pattern: str, word: str, reason: str
) -> None:
    model = build_meta_model(Family("cohere").hf_config(), dtype=torch.float64, attention="eager")
    right = with_derived_rules(ParallelPlan(mesh=MeshPlan(tp=2)), model).tensor
    model._tp_plan[f"model.layers.*.{pattern}"] = word
    found = with_derived_rules(ParallelPlan(mesh=MeshPlan(tp=2)), model).tensor
    assert f"The tensor parallel plan of transformers for a cohere is not used: {reason}" in capsys.readouterr().out
    assert found.styles == right.styles


def initial_weights(mesh: tuple[int, int, int, int]) -> dict[str, Tensor]:
    plan, model = resolve_family(MOES[0], mesh)
    pipeline = build_pipeline(
        model, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=1, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    return {name: full_tensor(parameter).detach() for name, parameter in pipeline.owned_parameters().items()}


def test_experts_start_equal_on_every_mesh() -> None:
    (one,) = run_on_ranks(1, initial_weights, (1, 1, 1, 1))
    for four in run_on_ranks(4, initial_weights, (1, 1, 2, 2)):
        assert one.keys() == four.keys()
        assert all(torch.equal(one[name], four[name]) for name in one)


@pytest.mark.parametrize(
    ("family", "wrong", "message"),
    [
        (
            Family("qwen3"),
            {"model.layers.*.self_attn": "whole_sequence", "model.layers.*.self_attn.q_norm": "replicate"},
            "model.layers.*.self_attn.q_norm is 'replicate', but it works on the heads, or the width, of one process, "
            "so its gradient must be summed; make it 'replicated_with_grad_allreduce'",
        ),
        (
            Family("cohere", {"use_qk_norm": True}),
            {"model.layers.*.self_attn.k_norm": "replicated_with_grad_allreduce"},
            "model.layers.*.self_attn.k_norm is 'replicated_with_grad_allreduce', but it has parameters for every "
            "head, and each process has a part of the heads; make it 'per_head'",
        ),
        (
            Family("llama"),
            {"model.layers.*.input_layernorm": "replicated_with_grad_allreduce"},
            "model.layers.*.input_layernorm is 'replicated_with_grad_allreduce', but it gets the same input on every "
            "process, so its gradient would count several times; make it 'replicate'",
        ),
        (
            Family("olmo2"),
            {
                "model.layers.*.self_attn.q_proj": "colwise",
                "model.layers.*.self_attn.k_proj": "colwise",
                "model.layers.*.self_attn.v_proj": "colwise",
                "model.layers.*.self_attn.o_proj": "rowwise",
            },
            "model.layers.*.self_attn.q_norm is 'replicate', but it computes over all heads at once, and each process "
            "has a part of them; keep the projections around it whole ('colwise_gather_output' and "
            "'rowwise_split_input'), or set mesh.tp = 1",
        ),
        (
            Family("bloom", {"slow_but_exact": True, "pretraining_tp": 2}),
            {"transformer.h.*.self_attention.dense": "rowwise_split_input"},
            "transformer.h.*.self_attention.dense is 'rowwise_split_input', but it is not called: with this "
            "configuration the model computes with its weight elsewhere, so it cannot be cut; set mesh.tp = 1",
        ),
    ],
    ids=["not summed", "per head", "counted twice", "joint", "not called"],
)
def test_wrong_rules_for_the_heads_are_refused(family: Family, wrong: dict[str, Style], message: str) -> None:
    plan, model = resolve_family(family, (1, 1, 1, 2))
    tensor = plan.tensor.model_copy(update={"styles": {**plan.tensor.styles, **wrong}})
    with pytest.raises(PlanError) as caught:
        resolve_plan(plan.model_copy(update={"tensor": tensor}), model, BatchShape(4, 1, 12), 2)
    assert f"tensor.styles: {message}" in caught.value.lines
