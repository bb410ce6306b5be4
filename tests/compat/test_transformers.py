"""transformers' private names exist, do what `meshtrain.compat` uses them for, and are restored."""

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3VLTextConfig,
    Qwen3VLTextModel,
)
from transformers.initialization import TORCH_INIT_FUNCTIONS

from meshtrain.compat import initialization, peft
from meshtrain.compat import transformers as compat
from meshtrain.compat.casts import float32_casts_lifted
from meshtrain.compat.causal_head import add_causal_class

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager"))


def test_properties_of_a_model() -> None:
    llama = model()
    config = llama.config
    assert compat.attention_implementation(config) == "eager"
    compat.loop_over_experts(config)
    assert compat.loops_over_experts(config)
    assert compat.supports_sdpa(LlamaForCausalLM)
    assert compat.tensor_plan(llama)["model.layers.*.self_attn.q_proj"] == "colwise"
    assert compat.declarable_ties(llama) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert compat.never_saved(llama) == compat.ignored_when_loaded(llama) == []
    assert compat.kept_dtypes(llama) == {}
    assert compat.keeps_keys_and_values(llama)
    assert compat.is_made_of_configuration(llama.generation_config)
    assert compat.PATH_KEY in vars(config)
    assert not compat.has_loss_of_program(llama)
    llama.loss_function = len
    assert compat.has_loss_of_program(llama)
    assert compat.build(LlamaForCausalLM, config, torch.float64).dtype == torch.float64
    layer = llama.model.layers[0]
    llama.gradient_checkpointing_enable()
    compat.set_checkpoint(layer, len)
    assert compat.checkpoint_of(layer) is len
    assert compat.named_function(layer, "eager_attention_forward") is not None
    assert compat.named_function(layer, "nothing") is None


def test_causal_class_of_a_text_model_is_like_a_stock_one() -> None:
    config = Qwen3VLTextConfig(**SIZES, head_dim=8, num_key_value_heads=1, tie_word_embeddings=True)
    kind = add_causal_class(Qwen3VLTextModel, Qwen3VLTextConfig)
    made = AutoModelForCausalLM.from_config(config)
    assert type(made) is kind
    assert kind.__name__ == "Qwen3VLTextForCausalLM"
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert compat.tensor_plan(made)["lm_head"] == "colwise_gather_output"
    assert compat.named_function(made, "eager_attention_forward") is not None
    ids = torch.arange(12).view(2, 6)
    output = made(input_ids=ids, labels=ids)
    expected = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    assert made(input_ids=ids, logits_to_keep=1).logits.shape == (2, 1, 32)
    assert made.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (2, 9)


def test_configurations_of_files_have_no_commit() -> None:
    config = model().config
    assert compat.commit_of(config) is None
    vars(config)["_commit_hash"] = "abc"
    assert compat.commit_of(config) == "abc"


def test_reads_of_a_configuration_are_recorded() -> None:
    read: set[str] = set()
    config = model().config
    compat.build(LlamaForCausalLM, compat.note_reads(config, read.add))
    assert {"hidden_size", "rms_norm_eps"} <= read
    assert type(config).__getattribute__ is PretrainedConfig.__getattribute__


def test_expert_implementation_is_copied() -> None:
    source, target = model().config, model().config
    compat.loop_over_experts(source)
    compat.copy_expert_implementation(source, target)
    assert compat.loops_over_experts(target)


def test_initialization_functions_are_restored() -> None:
    llama, functions, rule = model(), dict(TORCH_INIT_FUNCTIONS), PreTrainedModel._initialize_weights
    filled: list[str] = []
    ran: list[nn.Module] = []

    def replace(kind, original):
        return lambda tensor, *args, **kwargs: (filled.append(kind), tensor)[1]

    def wrap(module, run):
        ran.append(module)
        run()

    initialization.forget_marks(*llama.modules(), *llama.parameters())
    with (
        initialization.functions_replaced(replace, lambda tensor, value: tensor),
        initialization.rules_wrapped(wrap),
        initialization.counted_as(llama, LlamaForCausalLM),
        initialization.computed_in(torch.float64),
    ):
        assert torch.get_default_dtype() == torch.float64
        llama.initialize_weights()
    assert "normal_" in filled
    assert llama.lm_head in ran
    assert torch.get_default_dtype() == torch.float32
    assert dict(TORCH_INIT_FUNCTIONS) == functions
    assert PreTrainedModel._initialize_weights is rule
    initialization.mark_initialized(llama.lm_head.weight)
    assert initialization.is_marked(llama.lm_head.weight)


def test_float32_casts_are_restored() -> None:
    as_float = Tensor.float
    with float32_casts_lifted():
        assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float64
        assert model().double()(torch.ones(1, 3, dtype=torch.long)).logits.dtype == torch.float64
    assert Tensor.float is as_float
    assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float32


def test_methods_of_peft_layers_are_replaced() -> None:
    linear = nn.Linear(1, 1)
    peft.replace_methods(linear, forward=len)
    assert linear.forward is len
    with pytest.raises(AttributeError, match="gone"):
        peft.replace_methods(linear, gone=len)
