"""Tiny configurations keep the kinds of layers and the properties of a model."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, PipelinePlan
from meshtrain.errors import ModelError, PlanError
from meshtrain.models.build import build_meta_model
from meshtrain.models.dtypes import DTYPES
from meshtrain.models.layer_config import values_in_layers
from meshtrain.models.rotary import constant_length
from meshtrain.models.tiny import default_config, shrink
from meshtrain.parallel.tiny_copy import copy_with_all_kinds, layer_kinds
from meshtrain.verify.verify_run import make_case
from tests.parity import DYNAMIC, LONGROPE
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    "model_type",
    [
        *("gpt2", "llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "bamba", "bart", "opt"),
        *("gemma4_text", "dots3_note_text", "cohere_compass_text", "lfm2_moe", "emu3"),
    ],
)
def test_tiny_model_runs(model_type: str) -> None:
    config = tiny_config(model_type)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    assert model(input_ids=torch.arange(3, 19).view(2, 8), use_cache=False).logits.isfinite().all()


def test_kinds_of_layers_are_kept() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=26)
    assert config.layer_types.index("full_attention") == 5
    assert shrink(config, 4).layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    assert shrink(config, 1).layer_types == ["sliding_attention"]


@pytest.mark.parametrize(("heads", "expected"), [(8, 4), (2, 2), (1, 1)])
def test_sharing_of_key_value_heads_is_kept(heads: int, expected: int) -> None:
    config = AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=heads, hidden_size=64)
    tiny = shrink(config, 4)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads, tiny.num_hidden_layers) == (4, expected, 4)


@pytest.mark.parametrize(("tp", "heads", "vocabulary"), [(1, 2, 64), (4, 2, 63), (8, 1, 63)])
def test_divisibility_by_tp_is_kept(tp: int, heads: int, vocabulary: int) -> None:
    config = AutoConfig.for_model("llama", num_attention_heads=16, num_key_value_heads=4, vocab_size=50257)
    tiny = shrink(config, 2, tp=tp)
    assert (tiny.num_key_value_heads, tiny.vocab_size) == (heads, vocabulary)


def test_other_settings_of_a_configuration_are_kept() -> None:
    config = AutoConfig.for_model("llama", hidden_act="gelu", tie_word_embeddings=True, mlp_bias=True, rms_norm_eps=0.5)
    tiny = shrink(config, 3)
    assert shrink(AutoConfig.for_model("llama"), 3).rms_norm_eps == 0.01
    assert (type(tiny), tiny.hidden_act, tiny.tie_word_embeddings) == (type(config), "gelu", True)
    assert (tiny.mlp_bias, tiny.rms_norm_eps) == (True, 0.5)
    assert config.num_hidden_layers == 32


def test_dropout_is_disabled() -> None:
    config = AutoConfig.for_model("gpt2")
    assert config.resid_pdrop
    tiny = shrink(config, 2)
    assert (tiny.resid_pdrop, tiny.embd_pdrop, tiny.attn_pdrop) == (0.0, 0.0, 0.0)


class Stubborn(LlamaConfig):
    """A configuration that never becomes small."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.num_hidden_layers < 8:
            raise ValueError("too few layers")


def test_configurations_that_cannot_shrink_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^a llama configuration cannot be made small: too few layers$"):
        shrink(Stubborn(), 2)
    with pytest.raises(ModelError, match=r"^a musicgen configuration holds more than one text model, and transformers"):
        tiny_config("musicgen")
    with pytest.raises(
        ModelError, match=r"^a blt configuration has no number of layers; it holds several models \(patcher_con"
    ):
        tiny_config("blt")
    with pytest.raises(ModelError, match=r"^'gemma4_assistant' has no defaults: hidden_size_per_layer_input must be 0"):
        tiny_config("gemma4_assistant")


def test_differences_between_layers_are_kept() -> None:
    gemma = tiny_config("gemma4_text")
    assert [layer.head_dim for layer in gemma.per_layer_config] == [8, 8, 8, 16]
    dots = tiny_config("dots3_note_text")
    assert dots.layer_types == [*["indexed_attention"] * 2, *["sliding_attention"] * 2]
    assert values_in_layers(dots, "num_attention_heads") == values_in_layers(dots, "num_key_value_heads") == [4, 2]
    # All layers have experts, and the one with full attention is the last.
    llama = AutoConfig.for_model("llama4_text", num_hidden_layers=8, no_rope_layers=[1] * 7 + [0])
    assert (llama.moe_layers, shrink(llama, 4).moe_layers) == ([*range(8)], [*range(4)])
    assert shrink(llama, 4).layer_types == ["chunked_attention"] * 3 + ["full_attention"]
    # A switch for each layer is no list of layers.
    switched = AutoConfig.for_model("llama", num_hidden_layers=2, switches=[False, True])
    assert all(it is False or it is True for it in shrink(switched, 2).switches)
    sliding = dots.per_layer_config[2]
    assert sliding.head_dim == sliding.qk_nope_head_dim + sliding.qk_rope_head_dim == 20


def test_sharing_of_keys_between_layers_is_kept() -> None:
    config = AutoConfig.for_model("gemma4_text", num_kv_shared_layers=10)
    tiny = shrink(config, 4)
    assert tiny.num_kv_shared_layers == 2
    assert tiny.layer_types == ["sliding_attention", "full_attention"] * 2
    assert tiny.kv_sharing_modes == ["store", "store", "reuse", "reuse"]


def test_length_dependent_frequencies_are_kept() -> None:
    factors = [1.0 + index / 48 for index in range(48)]
    longrope = {**LONGROPE, "short_factor": factors, "long_factor": [3 * factor for factor in factors]}
    phi3 = AutoConfig.for_model("phi3", rope_parameters=longrope, original_max_position_embeddings=4096)
    for config, width in ((phi3, 4), (AutoConfig.for_model("llama", rope_parameters=longrope), 4)):
        tiny = shrink(config, 4)
        table = tiny.rope_parameters
        assert table["original_max_position_embeddings"] == 8 < tiny.max_position_embeddings
        assert table["short_factor"] == factors[:: 48 // width]
        assert table["long_factor"] == longrope["long_factor"][:: 48 // width]
        assert constant_length(build_meta_model(tiny, dtype=torch.float32, attention="eager")) == 8
    assert shrink(phi3, 4).original_max_position_embeddings == 8
    layered = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    for config in (
        AutoConfig.for_model("llama", rope_parameters=DYNAMIC),
        AutoConfig.for_model("gemma3_text", rope_parameters=layered),
    ):
        tiny = shrink(config, 4)
        assert tiny.rope_parameters == config.rope_parameters
        assert constant_length(build_meta_model(tiny, dtype=torch.float32, attention="eager")) == 8


@pytest.mark.parametrize(("model_type", "groups"), [("deepseek_v3", 2), ("glm4_moe", 1)])
def test_groups_of_experts_are_kept(model_type: str, groups: int) -> None:
    tiny = tiny_config(model_type)
    assert (tiny.n_group, tiny.topk_group, tiny.n_routed_experts, tiny.num_experts_per_tok) == (groups, 1, 4, 2)


def test_incomplete_defaults_are_completed() -> None:
    assert default_config("bert").is_decoder
    assert {*default_config("lfm2_moe").layer_types} == {"conv", "full_attention"}
    assert default_config("cohere_compass_text").rope_parameters["full_attention"]["rope_theta"] == 10_000
    assert default_config("qwen4_exp_text").indexer_budget == 8


@pytest.mark.parametrize(("model_type", "layers"), [("roc_bert", 4), ("longcat_flash", 8), ("inkling2_text", 4)])
def test_all_sizes_are_small(model_type: str, layers: int) -> None:
    config = tiny_config(model_type)
    model = build_meta_model(config, dtype=torch.float32, attention="eager")
    assert config.num_hidden_layers == layers
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000


def test_models_beside_the_language_model_are_small() -> None:
    config = tiny_config("emu3")
    assert (type(config).__name__, config.get_text_config().num_hidden_layers) == ("Emu3Config", 4)
    vision = tiny_config("phi4_multimodal").vision_config
    assert (vision.hidden_size, vision.num_hidden_layers) == (32, 1)


@pytest.mark.parametrize(("heads", "tp", "small"), [(16, 2, 8), (16, 4, 16), (12, 2, 12)])
def test_heads_in_four_blocks_are_kept(heads: int, tp: int, small: int) -> None:
    config = AutoConfig.for_model("codegen", n_head=heads, n_embd=heads * 64)
    plan, mesh = with_family(ParallelPlan(), "codegen"), MeshPlan(dp_shard=1, tp=tp)
    if small == heads == 12:
        with pytest.raises(PlanError, match=r"mesh\.tp = 2 does not divide the four blocks of 12 attention heads"):
            make_case(config, plan, mesh, attention="eager")
    else:
        assert make_case(config, plan, mesh, attention="eager").hf_config.n_head == small


@pytest.mark.parametrize(
    ("model_type", "layers", "count"),
    [
        ("llama", "balanced", 4),
        # The first layer with attention is the fifth.
        ("jamba", "balanced", 5),
        # The first layer with full attention and experts is the sixth.
        ("mimo_v2_flash", "balanced", 6),
        # Sliding attention without experts, sliding attention with them, full attention with them.
        ("exaone_moe", [16, 16], 4),
        # Two layers of each kind, and those of one kind share a block.
        ("zamba", "balanced", 4),
    ],
    ids=str,
)
def test_tiny_copy_has_every_kind_of_layer(model_type: str, layers: str | list[int], count: int) -> None:
    config = default_config(model_type)
    mesh = MeshPlan(dp_shard=1) if layers == "balanced" else MeshPlan(pp=2, dp_shard=1)
    plan = with_family(ParallelPlan(mesh=mesh, pipeline=PipelinePlan(layers_per_stage=layers)), model_type)
    tiny = make_case(config, plan, mesh, attention="eager").hf_config
    real, copy = (
        layer_kinds(build_meta_model(kept, dtype=DTYPES["float32"], attention="eager")) for kept in (config, tiny)
    )
    assert {*real} == {*copy}
    assert tiny.num_hidden_layers == count


def copy_with_blocks(number: int) -> PreTrainedModel:
    """Return a tiny Zamba 2, whose layers have so many shared blocks in turn."""
    config = default_config("zamba2", {"num_mem_blocks": number})
    build = partial(build_meta_model, dtype=DTYPES["float32"], attention="eager")
    return copy_with_all_kinds(layer_kinds(build(config)), range(4, 17), partial(shrink, config), build)[2]


def test_tiny_copy_has_every_block_that_layers_share() -> None:
    first, second, third = (
        layer.shared_transformer.input_layernorm.weight
        for layer in copy_with_blocks(2).model.layers
        if hasattr(layer, "shared_transformer")
    )
    assert first is third is not second
    refusal = (
        "^model.layers.6 of the zamba2 shares parameters with another layer, as no layer of its kind does in a tiny "
        "copy with up to 16 layers$"
    )
    with pytest.raises(ModelError, match=refusal):
        copy_with_blocks(8)


def test_kind_of_layer_without_a_tiny_copy_is_refused() -> None:
    config = AutoConfig.for_model("qwen3_moe", mlp_only_layers=[20])
    refusal = (
        r"^model\.layers\.20 of the qwen3_moe is of a kind of layer that no tiny copy with "
        r"up to 16 layers has$"
    )
    with pytest.raises(ModelError, match=refusal):
        make_case(config, with_family(ParallelPlan(), "qwen3_moe"), MeshPlan(dp_shard=1))


def test_value_that_a_class_does_not_support_yet_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"^'laguna' has no defaults: moe_apply_router_weight_on_input=True is not yet"
    ):
        default_config("laguna", {"moe_apply_router_weight_on_input": True})
