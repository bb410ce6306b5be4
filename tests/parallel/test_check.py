"""Plans that do not fit are refused with exact messages; plans that fit are resolved."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import (
    CompilePlan,
    ParallelPlan,
    PipelinePlan,
    PrecisionPlan,
    RecomputePlan,
    ShardPlan,
    TensorPlan,
)
from meshtrain.config.run import ModelConfig
from meshtrain.config.schedules import SCHEDULES
from meshtrain.errors import PlanError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.probe_inputs import PROBE_LENGTH
from meshtrain.parallel import check
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.cut import probe
from meshtrain.parallel.cut.trace import trace_parts
from tests.parity import DYNAMIC, GPT2, LLAMA
from tests.tiny import shared_block_config, tiny_config

BATCH = BatchShape(global_batch_size=8, micro_batch_size=1, sequence_length=12)
UNTIED = {**LLAMA, "tie_word_embeddings": False}


def meta_model(model_type: str, attention: str = "sdpa", **config: Any) -> PreTrainedModel:
    values = {**{"gpt2": GPT2, "llama": UNTIED, "qwen3": {**LLAMA, "head_dim": 8}}.get(model_type, {}), **config}
    hf_config = load_hf_config(ModelConfig(type=model_type, config=values))
    return build_meta_model(hf_config, dtype=torch.float32, attention=attention)


def make_plan(model_type: str = "", **tables: dict[str, Any]) -> ParallelPlan:
    """Return a plan with the rules of a family and the given tables."""
    plan = with_family(ParallelPlan(mesh=MeshPlan(**tables.pop("mesh", {}))), model_type)
    kinds = {"pipeline": PipelinePlan, "shard": ShardPlan, "recompute": RecomputePlan, "compile": CompilePlan}
    tensor = plan.tensor.model_copy(update=tables.pop("tensor", {}))
    return plan.model_copy(update={"tensor": tensor, **{name: kinds[name](**table) for name, table in tables.items()}})


def problems(
    plan: ParallelPlan, model: PreTrainedModel | None = None, batch: BatchShape = BATCH, world_size: int | None = None
) -> tuple[str, ...]:
    mesh = plan.mesh
    size = world_size or mesh.pp * mesh.dp_replicate * mesh.tp * max(1, mesh.dp_shard)
    with pytest.raises(PlanError) as caught:
        resolve_plan(plan, model or meta_model("llama"), batch, size)
    return caught.value.lines


def changed_styles(**changes: str | None) -> ParallelPlan:
    """Return Llama's plan at tp = 2, with rules replaced (or taken out, by None)."""
    styles: dict[str, Any] = dict(make_plan("llama").tensor.styles)
    for name, style in changes.items():
        styles.pop(name, None)
        if style is not None:
            styles[name] = style
    return make_plan("llama", mesh={"tp": 2}, tensor={"styles": styles})


def layers_of(pipeline: dict[str, Any], pp: int = 2, model_type: str = "gpt2", **config: Any) -> Any:
    plan = make_plan(model_type, mesh={"pp": pp}, pipeline=pipeline)
    return resolve_plan(plan, meta_model(model_type, **config), BATCH, pp).pipeline.layers_per_stage


def test_vocabulary_too_small_for_tp_is_refused() -> None:
    plan, model = make_plan("llama", mesh={"tp": 4}), meta_model("llama", vocab_size=5)
    assert problems(plan, model) == (
        "mesh.tp = 4 leaves a process without any of the 5 rows of model.embed_tokens; use a smaller tp or a larger "
        "vocabulary",
    )


# Resolved plans


def test_automatic_settings_are_resolved() -> None:
    plan = make_plan("gpt2", mesh={"pp": 2, "tp": 2})
    resolved = resolve_plan(plan, meta_model("gpt2"), BATCH, 8)
    assert resolved.mesh == MeshPlan(pp=2, dp_replicate=1, dp_shard=2, tp=2)
    assert resolved.pipeline.layers_per_stage == [2, 2]
    assert resolved.shard.reshard_after_forward == "never"
    assert resolved.tensor == plan.tensor
    assert num_microbatches(resolved, BATCH) == 4
    assert plan.mesh.dp_shard == -1, "the plan that was given is as it was"
    assert resolve_plan(resolved, meta_model("gpt2"), BATCH, 8) == resolved


@pytest.mark.parametrize(
    ("mesh", "wanted", "found"),
    [
        ({"dp_shard": 4}, "auto", "always"),
        ({"dp_replicate": 4}, "auto", "never"),
        ({"pp": 2, "dp_shard": 2}, "auto", "never"),
        ({"pp": 2, "dp_shard": 2}, "always", "always"),
        ({"dp_shard": 4}, "never", "never"),
    ],
)
def test_resharding_is_resolved(mesh: dict[str, int], wanted: str, found: str) -> None:
    plan = make_plan("llama", mesh=mesh, shard={"reshard_after_forward": wanted})
    assert resolve_plan(plan, meta_model("llama"), BATCH, 4).shard.reshard_after_forward == found


def test_layers_per_stage_are_resolved() -> None:
    assert layers_of({"layers_per_stage": "even"}, n_layer=5) == [3, 2]
    assert layers_of({"layers_per_stage": [1, 3]}) == [1, 3]
    assert layers_of({"layers_per_stage": [4, 0]}) == [4, 0]
    assert layers_of({"split_at": ["transformer.h.3"]}) == [3, 1]
    assert layers_of({"split_at": ["transformer.h.1", "transformer.h.2"]}, pp=3) == [1, 1, 2]
    assert layers_of({"layers_per_stage": "even"}, pp=1) == [4]
    interleaved = {"schedule": "Interleaved1F1B", "stages_per_rank": 2, "layers_per_stage": "even"}
    assert layers_of(interleaved) == [1, 1, 1, 1]


def test_each_layer_and_the_head_may_have_a_stage() -> None:
    for wanted in ([1, 1, 1, 1, 0], "balanced", "even"):
        assert layers_of({"layers_per_stage": wanted}, pp=5) == [1, 1, 1, 1, 0]


def test_balanced_counts_the_head() -> None:
    # One layer has 12 * 32 * 32 matrix elements and attends to 12 positions; the head has 32 for
    # each token of the vocabulary.
    layer = 12 * 32 * 32 + 12 * 32
    for times, expected in ((0.1, [2, 2]), (1.9, [3, 1]), (5, [4, 0])):
        assert layers_of({"layers_per_stage": "balanced"}, vocab_size=int(times * layer / 32)) == expected


def test_balanced_counts_the_experts_that_process_a_token() -> None:
    # Two dense layers, as wide as the four experts of 32 that process a token in the other layers.
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "mlp_only_layers": [0, 1]}
    model = meta_model("qwen3_moe", **LLAMA | experts | {"num_hidden_layers": 8, "intermediate_size": 256})
    resolved = resolve_plan(make_plan(mesh={"pp": 4}), model, BATCH, 4)
    assert resolved.pipeline.layers_per_stage == [2, 2, 2, 2]


def test_balanced_counts_the_modules_before_the_layers() -> None:
    # The projections around the layers cost as much as five layers.
    sizes = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 2}
    model = meta_model("opt", **sizes, word_embed_proj_dim=960, pad_token_id=0, bos_token_id=0, eos_token_id=1)
    resolved = resolve_plan(make_plan(mesh={"pp": 3}), model, BATCH, 3)
    assert resolved.pipeline.layers_per_stage == [1, 5, 0]


def test_model_without_attention_is_balanced() -> None:
    model = meta_model("mamba", "eager", hidden_size=32, num_hidden_layers=4, vocab_size=98)
    assert resolve_plan(make_plan(mesh={"pp": 2}), model, BATCH, 2).pipeline.layers_per_stage == [2, 2]


# The mesh


def test_wrong_world_size_is_refused() -> None:
    assert problems(make_plan("llama", mesh={"pp": 2, "dp_shard": 2, "tp": 2}), world_size=6) == (
        "mesh: pp 2 x dp_replicate 1 x dp_shard 2 x ep 1 x cp 1 x tp 2 needs 8 processes, but there are 6; start 8, or "
        "set plan.mesh.dp_shard = -1 to use all available processes",
    )
    assert problems(make_plan("llama", mesh={"pp": 2, "tp": 2}), world_size=6) == (
        "mesh: pp 2 x dp_replicate 1 x ep 1 x cp 1 x tp 2 uses processes in groups of 4, but 6 is not a multiple of 4; "
        "start a multiple of 4, or change the degrees",
    )


# The model


def test_plan_for_another_model_is_refused() -> None:
    plan = make_plan("llama").model_copy(update={"model_types": ["gpt2", "opt"]})
    assert problems(plan) == ("model_types: this plan is for gpt2, opt, but the model is a llama; use another plan",)


def test_layerdrop_is_refused() -> None:
    model = meta_model("opt", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, layerdrop=0.1)
    assert problems(make_plan(), model) == (
        "model.config.layerdrop = 0.1: a layer that is left out at random gets no gradient; set it to 0",
    )


# Batches


def test_indivisible_global_batch_is_refused() -> None:
    plan = make_plan("llama", mesh={"dp_replicate": 2, "dp_shard": 2})
    assert problems(plan, batch=BatchShape(14, 2, 12)) == (
        "global_batch_size = 14 is not a multiple of dp 4 x micro_batch_size 2 = 8; set it to 8 or 16",
    )
    assert problems(plan, batch=BatchShape(3, 2, 12)) == (
        "global_batch_size = 3 is not a multiple of dp 4 x micro_batch_size 2 = 8; set it to 8",
    )


def test_unsupported_sequence_length_is_refused() -> None:
    assert problems(make_plan("gpt2"), meta_model("gpt2"), BatchShape(8, 1, 65)) == (
        "data.sequence_length = 65 is longer than the 64 positions of the model; shorten it, or raise "
        "n_positions of a new model",
    )
    assert problems(make_plan("llama"), meta_model("llama"), BatchShape(8, 1, 65)) == (
        "data.sequence_length = 65 is longer than the 64 positions of the model; shorten it, or raise "
        "max_position_embeddings of a new model",
    )
    plan = make_plan("llama", mesh={"tp": 2}, tensor={"sequence_parallel": True})
    assert problems(plan, batch=BatchShape(8, 1, 13)) == (
        "tensor.sequence_parallel splits the sequence over tp = 2, which does not divide data.sequence_length = 13; "
        "set it to 12 or 14",
    )
    assert problems(plan, batch=BatchShape(8, 1, 12, width_multiple=3)) == (
        "tensor.sequence_parallel splits every batch over tp = 2, which does not divide data.pad_to_multiple_of = 3; "
        "set it to 2 or 4",
    )


def test_length_dependent_frequencies_of_the_model_are_accepted() -> None:
    model = meta_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=8)
    assert resolve_plan(make_plan("llama", mesh={"pp": 2}), model, BATCH, 2).mesh.pp == 2


def test_length_dependent_frequencies_inside_layers_are_refused() -> None:
    config = tiny_config("moshi")
    config.rope_parameters = {**DYNAMIC}
    model = build_meta_model(config, dtype=torch.float32, attention="eager")
    assert problems(make_plan(), model, world_size=1) == (
        "the rotary frequencies of model.layers.0.self_attn.rotary_emb, which is inside a layer, depend on the "
        "sequence length, so a recomputation or another microbatch could use those of another length; choose another "
        "rope_type in rope_parameters (not longrope, not dynamic)",
    )


def test_unlimited_positions_are_accepted() -> None:
    config = tiny_config("xlnet")
    assert config.max_position_embeddings == -1
    model = build_meta_model(config, dtype=torch.float32, attention="eager")
    assert resolve_plan(make_plan(), model, BATCH, 1).mesh.dp_shard == 1


# Tensor rules


def test_tp_without_a_plan_for_the_type_has_derived_rules() -> None:
    model = meta_model("xglm", "eager", d_model=32, num_layers=2, attention_heads=4, ffn_dim=48)
    resolved = resolve_plan(make_plan("xglm", mesh={"tp": 2}), model, BATCH, 2)
    assert resolved.tensor.styles["model.layers.*.self_attn.k_proj"] == "colwise"
    assert problems(make_plan("xglm", mesh={"tp": 8}), model)[0] == (
        "mesh.tp = 8 does not divide the model's 4 attention heads (num_attention_heads); set mesh.tp to one of 1, 2, 4"
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_unused_and_double_rules_are_refused(tp: int) -> None:
    styles = {**make_plan("llama").tensor.styles, "model.layers.*.mlp.gate": "colwise", "model.layers.0.mlp": "colwise"}
    assert problems(make_plan("llama", mesh={"tp": tp}, tensor={"styles": styles})) == (
        "tensor.styles: model.layers.0.mlp is matched by two rules, 'model.layers.*.mlp' and 'model.layers.0.mlp'; "
        "remove one",
        "tensor.styles: 'model.layers.*.mlp.gate' matches no module of the model; the nearest is "
        "'model.layers.*.mlp.gate_proj'",
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_unknown_fused_projections_and_local_attributes_are_refused(tp: int) -> None:
    plan = make_plan("gpt2", mesh={"tp": tp}, tensor={"fused": {"transformer.h.*.attn.c_atn": ["q", "k"]}})
    assert problems(plan, meta_model("gpt2")) == (
        "tensor.fused: 'transformer.h.*.attn.c_atn' matches no module of the model; the nearest is "
        "'transformer.h.*.attn.c_attn'",
    )
    plan = make_plan("gpt2", mesh={"tp": tp}, tensor={"local_attributes": {"transformer.h.*.atn": ["split_size"]}})
    assert problems(plan, meta_model("gpt2")) == (
        "tensor.local_attributes: 'transformer.h.*.atn' matches no module of the model; the nearest is "
        "'transformer.h.*.attn'",
    )


def test_local_attributes_that_are_not_widths_are_refused() -> None:
    attributes = {"transformer.h.*.attn": ["split_size", "split_sice", "layer_idx"]}
    plan = make_plan("gpt2", mesh={"tp": 4}, tensor={"local_attributes": attributes})
    assert problems(plan, meta_model("gpt2", n_layer=2)) == (
        "tensor.local_attributes: 'split_sice' of transformer.h.*.attn is None, which is not a number that "
        "tp = 4 divides; name another attribute, or set another mesh.tp",
        "tensor.local_attributes: 'layer_idx' of transformer.h.*.attn is 1, which is not a number that tp = 4 "
        "divides; name another attribute, or set another mesh.tp",
    )


def test_parameters_without_a_rule_are_refused() -> None:
    plan = changed_styles(**{"model.layers.*.mlp.up_proj": None, "model.norm": None, "lm_head": "shared_input"})
    assert problems(plan) == (
        "tensor.styles: no rule places the parameters of model.layers.*.mlp.up_proj; add one",
        "tensor.styles: no rule places the parameters of model.norm; add one",
        "tensor.styles: no rule places the parameters of lm_head; add one",
    )


def test_head_with_an_unsupported_style_is_refused() -> None:
    assert problems(changed_styles(lm_head="colwise")) == (
        "tensor.styles: the head lm_head is 'colwise'; make it 'colwise_gather_output' or 'replicate'",
    )


def test_styles_for_other_module_types_are_refused() -> None:
    changes = {"model.norm": "rowwise", "model.embed_tokens": "colwise", "model.layers.*.mlp": "colwise"}
    assert problems(changed_styles(**changes)) == (
        "tensor.styles: model.embed_tokens is 'colwise', which is for Linear and Conv1D, not for a Embedding; make it "
        "'replicate'",
        "tensor.styles: model.layers.*.mlp is 'colwise', which is for Linear and Conv1D, not for a LlamaMLP; make it "
        "'replicate'",
        "tensor.styles: model.norm is 'rowwise', which is for Linear and Conv1D, not for a LlamaRMSNorm; make it "
        "'replicate'",
    )
    assert problems(changed_styles(**{"model.norm": "embedding_rowwise"})) == (
        "tensor.styles: model.norm is 'embedding_rowwise', which is for an Embedding, not for a LlamaRMSNorm; make it "
        "'replicate'",
    )
    # This forward mixes the rows of the table, so a rank that holds some of them cannot compute it.
    model = meta_model("llama")
    forward = {"forward": lambda self, ids: nn.functional.embedding(ids, self.weight.softmax(0))}
    model.model.embed_tokens.__class__ = type("Mixed", (nn.Embedding,), forward)
    assert problems(changed_styles(), model) == (
        "tensor.styles: model.embed_tokens is 'embedding_rowwise', which is for an Embedding, not for a Mixed; make "
        "it 'replicate'",
    )
    model = meta_model("llama")
    model.model.embed_tokens.max_norm = 1.0
    assert problems(changed_styles(), model) == (
        "tensor.styles: model.embed_tokens is 'embedding_rowwise', but its max_norm or scale_grad_by_freq needs the "
        "full table; make it 'replicate'",
    )


def test_styles_that_need_missing_config_values_are_refused() -> None:
    changes = {"model.layers.*.self_attn.k_proj": "mla_kv_a_proj", "model.layers.*.mlp.up_proj": "replicated_heads"}
    assert problems(changed_styles(**changes)) == (
        "tensor.styles: model.layers.*.self_attn.k_proj is 'mla_kv_a_proj', but the model's configuration has no "
        "qk_rope_head_dim; make it 'replicate'",
        "tensor.styles: model.layers.*.mlp.up_proj is 'replicated_heads', but no module around it has "
        "num_key_value_groups to say which heads share one; make it 'colwise', with a tp that divides its heads",
        "tensor.styles: model.layers.*.self_attn.k_proj is 'mla_kv_a_proj', but inside of model.layers.*.self_attn "
        "('shared_input') each process works for its shards only, so the gradient of its outputs would be summed "
        "twice; make it 'replicated_with_grad_allreduce'",
    )
    model = meta_model("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj = Conv1D(32, 64)
    assert problems(changed_styles(**{"model.layers.*.self_attn.k_proj": "replicated_heads"}), model) == (
        "tensor.styles: model.layers.*.self_attn.k_proj is 'replicated_heads', which is for Linear, not for a Conv1D; "
        "make it 'replicate'",
    )


def test_shared_heads_need_as_many_heads_in_each_layer_as_the_configuration_says() -> None:
    model = meta_model("llama")
    model.model.layers[1].self_attn.num_key_value_groups *= 2
    (problem,) = problems(changed_styles(**{"model.layers.*.self_attn.k_proj": "replicated_heads"}), model)
    assert problem == (
        "tensor.styles: model.layers.*.self_attn.k_proj is 'replicated_heads', but this layer has "
        "2 key-value heads, and the configuration says 4; use a tp that divides both"
    )


def test_parameters_of_a_block_that_shares_its_input_need_rules() -> None:
    model = meta_model("gpt_oss", "eager", **LLAMA, num_local_experts=4, num_experts_per_tok=2)
    plan = resolve_plan(make_plan("gpt_oss", mesh={"tp": 2}), model, BATCH, 2)
    attention = "model.layers.*.self_attn"
    for changes in ({}, {f"{attention}.sinks": "replicate"}):
        styles = {name: style for name, style in plan.tensor.styles.items() if not name.endswith(".sinks")} | changes
        changed = plan.model_copy(update={"tensor": plan.tensor.model_copy(update={"styles": styles})})
        assert problems(changed, model) == (
            f"tensor.styles: {attention} is 'shared_input', and no rule shards its {attention}.sinks, or sums "
            f"its gradient; make that 'colwise' or 'replicated_with_grad_allreduce', or {attention} 'whole_sequence'",
        )


def test_wrong_styles_of_single_parameters_are_refused() -> None:
    model = meta_model("mixtral", **LLAMA, num_local_experts=4, num_experts_per_tok=2)
    plan, experts = resolve_plan(make_plan(mesh={"tp": 2}), model, BATCH, 2), "model.layers.*.mlp.experts"

    def message(**changes: str) -> tuple[str, ...]:
        styles = {**plan.tensor.styles, **{f"{experts}{end}": style for end, style in changes.items()}}
        return problems(plan.model_copy(update={"tensor": plan.tensor.model_copy(update={"styles": styles})}), model)

    needs = (
        "but a rule for a parameter needs its module to be one of shared_input, whole_sequence, local_params, "
        "moe_tp_experts; give the module such a rule, or leave this one out"
    )
    assert message(**{"": "replicate"}) == (
        f"tensor.styles: {experts}.gate_up_proj is 'colwise', {needs}",
        f"tensor.styles: {experts}.down_proj is 'rowwise', {needs}",
    )
    assert message(**{".down_proj": "rowwise_split_input"}) == (
        f"tensor.styles: {experts}.down_proj is 'rowwise_split_input'; make it 'colwise', 'rowwise', 'replicate' or "
        "'replicated_with_grad_allreduce'",
    )


def test_tied_weights_with_different_placements_are_refused() -> None:
    tied = meta_model("llama", tie_word_embeddings=True)
    advice = "but they are one weight; make them 'colwise_gather_output' and 'embedding_rowwise', or both 'replicate'"
    assert problems(changed_styles(lm_head="replicate"), tied) == (
        f"tensor.styles: lm_head is 'replicate' and model.embed_tokens is 'embedding_rowwise', {advice}",
    )
    assert problems(changed_styles(**{"model.embed_tokens": "replicate"}), tied) == (
        f"tensor.styles: lm_head is 'colwise_gather_output' and model.embed_tokens is 'replicate', {advice}",
    )
    both = changed_styles(**{"model.embed_tokens": "replicate", "lm_head": "replicate"})
    assert resolve_plan(both, tied, BATCH, 2)
    assert resolve_plan(changed_styles(lm_head="replicate"), meta_model("llama"), BATCH, 2)


def test_layers_that_share_a_block_have_the_same_styles() -> None:
    model = build_meta_model(shared_block_config(), dtype=torch.float32)
    styles = dict(resolve_plan(make_plan(mesh={"tp": 2}), model, BATCH, 2).tensor.styles)
    block = "shared_transformer"
    one = {**styles, f"model.layers.1.{block}": styles[f"model.layers.*.{block}"]}
    del one[f"model.layers.*.{block}"]
    assert problems(make_plan(mesh={"tp": 2}, tensor={"styles": one}), model) == (
        f"tensor.styles: model.layers.3.{block} has none and model.layers.1.{block} is 'whole_sequence', but they "
        "share parameters; give both the same style",
    )
    norm = "shared_transformer.input_layernorm"
    others = {f"model.layers.1.{norm}": "replicate", f"model.layers.3.{norm}": "sequence_parallel"}
    assert styles.pop(f"model.layers.*.{norm}") == "replicate"
    assert problems(make_plan(mesh={"tp": 2}, tensor={"styles": styles | others}), model) == (
        f"tensor.styles: model.layers.3.{norm} is 'sequence_parallel' and model.layers.1.{norm} is 'replicate', but "
        "they share parameters; give both the same style",
    )
    whole = "model.layers.*.shared_transformer.feed_forward.gate_up_proj"
    assert styles.pop(whole) == "replicate"
    parts = dict.fromkeys([f"{whole}.gate", f"{whole}.up", f"model.layers.*.{norm}"], "replicate")
    for mesh in ({"tp": 2}, {"dp_replicate": 1}):
        plan = make_plan(mesh=mesh, tensor={"styles": styles | parts, "fused": {whole: ["gate", "up"]}})
        assert problems(plan, model) == (
            f"tensor.fused: the parameters of {whole} are shared (they have several names in the model), so its parts "
            "cannot have their own; leave it out, or share none",
        )


def test_layers_that_share_a_parameter_have_the_same_rule_for_it() -> None:
    model, block = build_meta_model(shared_block_config(), dtype=torch.float32), "shared_transformer"
    scale = nn.Parameter(torch.empty(2, device="meta"))
    for layer in (1, 3):
        model.get_submodule(f"model.layers.{layer}.{block}").register_parameter("scale", scale)
    ends = [f"model.layers.{layer}.{block}.scale" for layer in (3, 1)]
    model.all_tied_weights_keys[ends[0]] = ends[1]
    styles = resolve_plan(make_plan(mesh={"tp": 2}), model, BATCH, 2).tensor.styles
    assert problems(make_plan(mesh={"tp": 2}, tensor={"styles": {**styles, ends[1]: "replicate"}}), model) == (
        f"tensor.styles: {ends[0]} has none and {ends[1]} is 'replicate', but they share parameters; give both "
        "the same style",
    )


@pytest.mark.parametrize("style", ["replicate", "sequence_parallel"])
def test_norms_on_heads_must_be_summed(style: str) -> None:
    styles = {**make_plan("qwen3").tensor.styles, "model.layers.*.self_attn.q_norm": style}
    assert problems(make_plan("qwen3", mesh={"tp": 2}, tensor={"styles": styles}), meta_model("qwen3")) == (
        f"tensor.styles: model.layers.*.self_attn.q_norm is '{style}', but inside of model.layers.*.self_attn "
        "('shared_input') each process works for its shards only, so its gradient must be summed; make it "
        "'replicated_with_grad_allreduce'",
    )


def test_check_leaves_the_random_numbers_of_the_program_alone() -> None:
    before = torch.get_rng_state()
    # The norms on the heads are probed with random numbers.
    resolve_plan(make_plan("", mesh={"tp": 2}), meta_model("cohere", **LLAMA, use_qk_norm=True), BATCH, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_norms_on_a_part_of_the_sequence_must_be_summed() -> None:
    plan = changed_styles(**{"model.layers.*.input_layernorm": "replicate"})
    assert resolve_plan(plan, meta_model("llama"), BATCH, 2)
    with_parts = plan.model_copy(update={"tensor": plan.tensor.model_copy(update={"sequence_parallel": True})})
    assert problems(with_parts) == (
        "tensor.styles: model.layers.*.input_layernorm is 'replicate', which needs the full sequence, but with "
        "tensor.sequence_parallel each process has a part of it; make it 'sequence_parallel'",
    )


def test_block_with_parameters_of_its_heads_needs_the_full_sequence() -> None:
    attention = "model.layers.*.self_attn"
    model = meta_model("gpt_oss", "eager", **LLAMA, num_local_experts=4, num_experts_per_tok=2)
    plan = resolve_plan(make_plan("gpt_oss", mesh={"tp": 2}), model, BATCH, 2)
    styles = {**plan.tensor.styles, attention: "local_params"}
    changes = {"styles": styles, "sequence_parallel": True}
    with_parts = plan.model_copy(update={"tensor": plan.tensor.model_copy(update=changes)})
    assert problems(with_parts, model) == (
        f"tensor.styles: {attention} is 'local_params', which needs the full sequence, but with "
        "tensor.sequence_parallel each process has a part of it; make it 'whole_sequence'",
    )
    changes["styles"] = {**styles, attention: "whole_sequence"}
    advised = plan.model_copy(update={"tensor": plan.tensor.model_copy(update=changes)})
    assert resolve_plan(advised, model, BATCH, 2)


def test_projection_that_cuts_its_input_needs_the_full_sequence() -> None:
    plan = changed_styles(**{"model.layers.*.mlp.down_proj": "rowwise_split_input"})
    with_parts = plan.model_copy(update={"tensor": plan.tensor.model_copy(update={"sequence_parallel": True})})
    assert problems(with_parts) == (
        "tensor.styles: model.layers.*.mlp.down_proj is 'rowwise_split_input', which needs the full sequence, but with "
        "tensor.sequence_parallel each process has a part of it; set tensor.sequence_parallel = false",
    )


def test_module_that_the_forward_pass_replaces_is_refused() -> None:
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    make = partial(meta_model, "big_bird", "eager", vocab_size=64, is_decoder=True, **small)
    plan = make_plan(mesh={"tp": 2})
    assert problems(plan, make()) == (
        "tensor.styles: the forward pass of BigBirdForCausalLM replaces bert.encoder.layer.*.attention.self by a new "
        "module, which would not draw dropout and compute for the part of one process; choose a configuration with "
        "which its modules stay, or set mesh.tp = 1",
    )
    resolve_plan(plan, make(attention_type="original_full"), BATCH, 2)


def test_heads_that_tp_does_not_divide_are_shared() -> None:
    model = meta_model("llama", hidden_size=96, num_attention_heads=12, num_key_value_heads=6)

    def styles(tp: int) -> list[str]:
        found = resolve_plan(make_plan("llama", mesh={"tp": tp}), model, BATCH, tp).tensor.styles
        return [found[f"model.layers.*.self_attn.{kind}_proj"] for kind in "qkvo"]

    assert styles(2) == ["colwise", "colwise", "colwise", "rowwise"]
    assert styles(4) == ["colwise", "replicated_heads", "replicated_heads", "rowwise"]
    assert styles(8) == ["colwise_heads", "replicated_heads", "replicated_heads", "rowwise_heads"]


def test_more_processes_than_heads_are_refused() -> None:
    model = meta_model("llama", hidden_size=96, num_attention_heads=3, num_key_value_heads=3)
    assert problems(make_plan("llama", mesh={"tp": 4}), model) == (
        "mesh.tp = 4 does not divide the model's 3 attention heads (num_attention_heads); set mesh.tp to one of 1, 3",
        "mesh.tp = 4 does not divide the model's 3 key-value heads (num_key_value_heads); set mesh.tp to one of 1, 3",
    )


def test_indivisible_heads_of_falcon_are_refused() -> None:
    config = AutoConfig.for_model("falcon", num_attention_heads=8, num_kv_heads=2, new_decoder_architecture=True)
    model = build_meta_model(config, dtype=torch.float32, attention="eager")
    assert problems(make_plan(mesh={"tp": 4}), model) == (
        "mesh.tp = 4 does not divide the model's 2 key-value heads (num_kv_heads); set mesh.tp to one of 1, 2",
    )


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_indivisible_mlp_width_is_refused(model_type: str) -> None:
    name = {"llama": "model.layers.0.mlp.gate_proj", "gpt2": "transformer.h.0.mlp.c_fc"}[model_type]
    width = {"llama": {"intermediate_size": 50}, "gpt2": {"n_inner": 50}}[model_type]
    assert problems(make_plan(model_type, mesh={"tp": 4}), meta_model(model_type, **width)) == (
        f"mesh.tp = 4 does not divide the width 50 of {name} (colwise); set mesh.tp to one of 1, 2, 5, 10, 25, 50",
    )


# The pipeline


def test_wrong_stages_per_rank_are_refused() -> None:
    def message(schedule: str, stages_per_rank: int, pp: int = 2) -> tuple[str, ...]:
        pipeline = {"schedule": schedule, "stages_per_rank": stages_per_rank}
        return problems(make_plan("llama", mesh={"pp": pp}, pipeline=pipeline))

    assert message("GPipe", 2) == (
        "pipeline.schedule = 'GPipe' needs stages_per_rank = 1, found 2; set it to that, or use a schedule for 2: "
        "Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV",
    )
    assert message("ZBVZeroBubble", 1) == (
        "pipeline.schedule = 'ZBVZeroBubble' needs stages_per_rank = 2, found 1; set it to that, or use a schedule for "
        "1: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble",
    )
    assert message("Interleaved1F1B", 2, pp=1) == (
        "pipeline.stages_per_rank = 2 needs mesh.pp > 1, found mesh.pp = 1; change one of them",
    )


@pytest.mark.parametrize(
    ("schedule", "numbers"),
    [
        ("GPipe", (1,)),
        ("1F1B", (1,)),
        ("Interleaved1F1B", (1, 2, 3)),
        ("LoopedBFS", (1, 2, 3)),
        ("InterleavedZeroBubble", (1, 2, 3)),
        ("ZBVZeroBubble", (2,)),
        ("DualPipeV", (2,)),
    ],
)
def test_every_schedule_accepts_its_stages_per_rank(schedule: str, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        pipeline = {"schedule": schedule, "stages_per_rank": number}
        plan = make_plan("llama", mesh={"pp": 2, "dp_shard": 2}, pipeline=pipeline)
        resolved = resolve_plan(plan, meta_model("llama", num_hidden_layers=6), BATCH, 4)
        assert len(resolved.pipeline.layers_per_stage) == 2 * number
        assert resolved.shard.reshard_after_forward == "never"


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1F1B", 1), ("DualPipeV", 2)])
def test_fewer_microbatches_than_stages_are_refused(schedule: str, stages_per_rank: int) -> None:
    pp = 4 // stages_per_rank
    pipeline = {"schedule": schedule, "stages_per_rank": stages_per_rank}
    plan = make_plan("llama", mesh={"pp": pp, "dp_replicate": 2}, pipeline=pipeline)
    assert problems(plan, batch=BatchShape(12, 2, 12)) == (
        f"pipeline.schedule = '{schedule}' needs at least as many microbatches as stages: found 3 for 4 stages; "
        "raise global_batch_size to 16 or lower micro_batch_size",
    )
    assert resolve_plan(plan, meta_model("llama"), BatchShape(16, 2, 12), pp * 2)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_microbatches_without_equal_rounds_are_refused(schedule: str) -> None:
    plan = make_plan("llama", mesh={"pp": 2}, pipeline={"schedule": schedule, "stages_per_rank": 2})
    assert problems(plan, batch=BatchShape(5, 1, 12)) == (
        f"pipeline.schedule = '{schedule}' runs microbatches in equal rounds of at least pp = 2; 5 cannot be "
        "divided in this way; use a multiple of 2",
    )
    for fits in (1, 2, 3, 4, 8):
        assert resolve_plan(plan, meta_model("llama"), BatchShape(fits, 1, 12), 2)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_split_backward_with_resharding_or_compilation_is_refused(schedule: str) -> None:
    pipeline = {"schedule": schedule, "stages_per_rank": 2}
    shard = {"reshard_after_forward": "always"}
    plan = make_plan("llama", mesh={"pp": 2, "dp_shard": 2}, pipeline=pipeline, shard=shard)
    resharding = (
        f"pipeline.schedule = '{schedule}' computes the gradients of the weights separately, and torch loses them "
        "without an error where parameters are freed in between (shard.reshard_after_forward = 'always'); set it "
        "to 'never'"
    )
    compiling = (
        f"pipeline.schedule = '{schedule}' computes the gradients of the weights separately, which torch cannot do "
        "with compiled layers; set compile.enabled = false, or use 1F1B or Interleaved1F1B"
    )
    assert problems(plan) == (resharding,)
    compiled = plan.model_copy(update={"compile": CompilePlan(enabled=True)})
    assert problems(compiled) == (resharding, compiling)
    # With one process per shard, FSDP2 is used too if there are two number formats.
    alone = make_plan("llama", mesh={"pp": 2, "dp_shard": 1}, pipeline=pipeline, shard=shard)
    assert resolve_plan(alone, meta_model("llama"), BATCH, 2)
    mixed = alone.model_copy(update={"precision": PrecisionPlan(compute="bfloat16")})
    assert problems(mixed) == (resharding,)


def test_fewer_layers_than_stages_are_refused() -> None:
    plan = make_plan("llama", mesh={"pp": 4}, pipeline={"schedule": "Interleaved1F1B", "stages_per_rank": 2})
    assert problems(plan) == ("mesh.pp x stages_per_rank makes 8 stages, but the model has only 4 layers; use fewer",)
    cuts = [f"model.layers.{index}" for index in range(1, 5)]
    assert problems(make_plan("llama", mesh={"pp": 5}, pipeline={"split_at": cuts})) == (
        "mesh.pp x stages_per_rank makes 5 stages, but the model has only 4 layers; use fewer",
    )


def test_wrong_layers_per_stage_are_refused() -> None:
    def message(layers: list[int], pp: int = 2) -> tuple[str, ...]:
        return problems(make_plan("llama", mesh={"pp": pp}, pipeline={"layers_per_stage": layers}))

    assert message([2, 1, 1]) == (
        "pipeline.layers_per_stage = [2, 1, 1] names 3 stages, but mesh.pp x stages_per_rank makes 2; set 2 numbers",
    )
    assert message([2, 3]) == (
        "pipeline.layers_per_stage = [2, 3] adds up to 5 layers, but the model has 4; make them add up",
    )
    assert message([0, 4]) == (
        "pipeline.layers_per_stage = [0, 4]: only the last stage may have no layer (it still has the head); give "
        "every other stage a layer",
    )
    assert message([4, 0, 0], pp=3) == (
        "pipeline.layers_per_stage = [4, 0, 0]: only the last stage may have no layer (it still has the head); give "
        "every other stage a layer",
    )


def test_wrong_split_at_is_refused() -> None:
    def message(names: list[str], pp: int = 2, **model: Any) -> tuple[str, ...]:
        plan = make_plan("llama", mesh={"pp": pp}, pipeline={"split_at": names})
        return problems(plan, meta_model("llama", **model))

    assert message(["model.layers.4"]) == (
        "pipeline.split_at: 'model.layers.4' is not a layer where this model can be cut; name layers from "
        "model.layers.1 to model.layers.3",
    )
    assert message(["model.layers.0"]) == (
        "pipeline.split_at: 'model.layers.0' is not a layer where this model can be cut; name layers from "
        "model.layers.1 to model.layers.3",
    )
    assert message(["model.layers.1", "model.layers.2"]) == (
        "pipeline.split_at names 2 cuts, but 2 stages need 1; name 1",
    )
    assert message([]) == ("pipeline.split_at names 0 cuts, but 2 stages need 1; name 1",)
    # A model of one layer has no layer where it can be cut.
    assert message(["model.layers.1"], pp=1, num_hidden_layers=1) == (
        "pipeline.split_at names 1 cuts, but 1 stages need 0; leave it out",
    )
    for names in (["model.layers.3", "model.layers.1"], ["model.layers.1", "model.layers.1"]):
        assert message(names, pp=3) == (
            f"pipeline.split_at: the cuts {names} are not in the order of the model; name each once, from the first "
            "to the last",
        )


def test_layers_per_stage_with_split_at_is_refused() -> None:
    pipeline = {"layers_per_stage": [2, 2], "split_at": ["model.layers.2"]}
    assert problems(make_plan("llama", mesh={"pp": 2}, pipeline=pipeline)) == (
        "pipeline: layers_per_stage = [2, 2] and split_at are both set; leave one out",
    )


def test_class_that_cannot_be_cut_is_refused() -> None:
    model = build_meta_model(tiny_config("reformer"), dtype=torch.float32, attention="eager")
    assert problems(make_plan(mesh={"pp": 2}), model) == (
        "ReformerModelWithLMHead cannot be cut into stages: it calls reformer.encoder.layers.0 without autograd, and "
        "computes gradients itself; use pp = 1",
    )


def test_indivisible_heads_of_single_layers_are_refused() -> None:
    config = tiny_config("dots3_note_text")
    model = build_meta_model(config, dtype=torch.float32, attention="eager")
    found = problems(make_plan(mesh={"tp": 4}), model)
    assert found[:2] == tuple(
        f"mesh.tp = 4 does not divide the model's 2 {what} ({name}); set mesh.tp to one of 1, 2"
        for what, name in (("attention heads", "num_attention_heads"), ("key-value heads", "num_key_value_heads"))
    )


def test_layers_without_recomputation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "GradientCheckpointingLayer", nn.Conv2d)
    assert problems(make_plan("llama", recompute={"mode": "full"})) == (
        "recompute.mode = 'full': LlamaDecoderLayer does not support recomputation; set it to 'none'",
    )


def test_selective_recomputation_of_partly_compiled_layers_is_refused() -> None:
    tables: dict[str, Any] = {"recompute": {"mode": "selective"}, "compile": {"enabled": True}}
    assert problems(make_plan("llama", mesh={"tp": 2}, **tables)) == (
        "recompute.mode = 'selective' with compile.enabled and mesh.tp > 1: attention and MLP are then compiled "
        "separately, and torch cannot select the results to keep inside them; set recompute.mode = 'full', or "
        "compile.enabled = false",
    )
    assert resolve_plan(make_plan("llama", **tables), meta_model("llama"), BATCH, 2)
    assert resolve_plan(
        make_plan("llama", mesh={"tp": 2}, recompute={"mode": "selective"}), meta_model("llama"), BATCH, 2
    )


@pytest.mark.parametrize("schedule", [name for name, facts in SCHEDULES.items() if facts.splits_backward])
def test_selective_recomputation_with_a_split_backward_is_refused(schedule: str) -> None:
    plan = make_plan("llama", mesh={"pp": 2}, recompute={"mode": "selective"})
    plan = plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"schedule": schedule})})
    assert [problem for problem in problems(plan) if problem.startswith("recompute")] == [
        f"recompute.mode = 'selective' with pipeline.schedule = {schedule!r}: the schedule runs back through a layer "
        "twice, but torch returns what selective recomputation has kept only once; set recompute.mode = 'full', or "
        "use another schedule",
    ]


def test_model_without_a_layer_list_is_refused() -> None:
    model = meta_model("llama")
    model.model.layers = nn.Sequential(*model.model.layers)
    plan = make_plan(mesh={"dp_replicate": 3}, recompute={"mode": "full"})
    assert problems(plan, model) == (
        "global_batch_size = 8 is not a multiple of dp 3 x micro_batch_size 1 = 3; set it to 6 or 9",
        "LlamaForCausalLM has no list of modules with parameters, so it cannot be cut or sharded by layer",
    )


def test_all_contradictions_are_reported_together() -> None:
    styles = {**make_plan("llama").tensor.styles, "model.nrom": "replicate"}
    plan = make_plan(
        "llama",
        mesh={"pp": 8, "dp_replicate": 3, "tp": 8},
        pipeline={"schedule": "GPipe", "stages_per_rank": 2},
        tensor={"styles": styles, "sequence_parallel": True},
    ).model_copy(update={"model_types": ["gpt2"]})
    found = problems(plan, batch=BatchShape(8, 1, 100))
    starts = (
        "model_types: ",
        "global_batch_size = 8 is not a multiple",
        "data.sequence_length = 100 is longer",
        "tensor.sequence_parallel splits the sequence over tp = 8",
        "mesh.tp = 8 does not divide the model's 4 attention heads",
        "mesh.tp = 8 does not divide the model's 4 key-value heads",
        "tensor.styles: 'model.nrom' matches no module",
        "pipeline.schedule = 'GPipe' needs stages_per_rank = 1",
        "mesh.pp x stages_per_rank makes 16 stages",
    )
    assert len(found) == len(starts)
    assert all(problem.startswith(start) for problem, start in zip(found, starts, strict=True)), found


def test_check_leaves_the_model_unchanged() -> None:
    model = meta_model("gpt2")
    before = {name: type(module) for name, module in model.named_modules()}
    resolve_plan(make_plan("gpt2", mesh={"pp": 2, "tp": 2}), model, BATCH, 4)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.training
    assert model.lm_head.weight is model.transformer.wte.weight
    assert TensorPlan() == make_plan().tensor


def test_check_traces_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def trace_counted(*args: Any, length: int) -> Any:
        lengths.append(length)
        return trace_parts(*args, length=length)

    monkeypatch.setattr(probe, "trace_parts", trace_counted)
    layers_of({"layers_per_stage": "balanced"})
    assert lengths == [PROBE_LENGTH]
    layers_of({"layers_per_stage": "balanced"})
    assert lengths == [PROBE_LENGTH] * 2, "another model may differ"
