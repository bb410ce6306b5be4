"""Tiny configurations keep what a model is made of."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from meshtrain.errors import ModelError
from meshtrain.verify.tiny import shrink, tiny_config


@pytest.mark.parametrize(
    "model_type", ["gpt2", "llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "bamba", "bart", "opt"]
)
def test_a_tiny_model_runs(model_type: str) -> None:
    config = tiny_config(model_type)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    assert model(input_ids=torch.arange(3, 19).view(2, 8), use_cache=False).logits.isfinite().all()


def test_kinds_of_layers_stay() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=26)
    assert config.layer_types.index("full_attention") == 5
    assert shrink(config, 4).layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    assert shrink(config, 1).layer_types == ["sliding_attention"]


@pytest.mark.parametrize(("heads", "expected"), [(8, 4), (2, 2), (1, 1)])
def test_the_sharing_of_key_value_heads_stays(heads: int, expected: int) -> None:
    config = AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=heads, hidden_size=64)
    tiny = shrink(config, 4)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads, tiny.num_hidden_layers) == (4, expected, 4)


@pytest.mark.parametrize(("tp", "heads", "vocabulary"), [(1, 2, 64), (4, 2, 63), (8, 1, 63)])
def test_what_tp_makes_of_the_model_stays(tp: int, heads: int, vocabulary: int) -> None:
    config = AutoConfig.for_model("llama", num_attention_heads=16, num_key_value_heads=4, vocab_size=50257)
    tiny = shrink(config, 2, tp=tp)
    assert (tiny.num_key_value_heads, tiny.vocab_size) == (heads, vocabulary)


def test_what_a_configuration_says_stays() -> None:
    config = AutoConfig.for_model("llama", hidden_act="gelu", tie_word_embeddings=True, mlp_bias=True, rms_norm_eps=0.5)
    tiny = shrink(config, 3)
    assert (type(tiny), tiny.hidden_act, tiny.tie_word_embeddings) == (type(config), "gelu", True)
    assert (tiny.mlp_bias, tiny.rms_norm_eps) == (True, 0.5)
    assert config.num_hidden_layers == 32


def test_dropout_is_off() -> None:
    config = AutoConfig.for_model("gpt2")
    assert config.resid_pdrop
    tiny = shrink(config, 2)
    assert (tiny.resid_pdrop, tiny.embd_pdrop, tiny.attn_pdrop) == (0.0, 0.0, 0.0)


class Stubborn(LlamaConfig):
    """A configuration that is never small."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.num_hidden_layers < 8:
            raise ValueError("too few layers")


def test_what_cannot_be_made_small() -> None:
    with pytest.raises(ModelError, match=r"^a llama configuration cannot be made small: too few layers$"):
        shrink(Stubborn(), 2)
    with pytest.raises(ModelError, match=r"^'musicgen' has no defaults: Multiple valid text configs were found"):
        tiny_config("musicgen")
