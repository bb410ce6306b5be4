"""Counted FLOPs against those that torch counts while the layer runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.flops import flops_of_modules, layer_flops_per_token, matmul_parameters
from meshtrain.parallel.cut.probe import find_layers
from tests.parity import LLAMA, MODELS

SEQUENCE = 16
# Each type has one layer of experts of default size, and the number of parameters that process a
# token: width x width of attention, experts of three matrices of width x inner, and the router with
# one row for each expert.
MIXTRAL = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 8 * 4096
QWEN3_MOE = 2 * 2048 * 2048 + 2 * 2048 * 256 + 8 * 3 * 2048 * 768 + 128 * 2048
# Queries go through 1536, keys and values through 512 and 64 positions, with 128 heads; there are
# eight experts and a shared one.
DEEPSEEK = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
DEEPSEEK += (8 + 1) * 3 * 7168 * 2048 + 256 * 7168
EXPERTS = {
    "mixtral": ({"num_hidden_layers": 1}, MIXTRAL),
    "qwen3_moe": ({"num_hidden_layers": 1}, QWEN3_MOE),
    "deepseek_v3": ({"num_hidden_layers": 1, "first_k_dense_replace": 0}, DEEPSEEK),
}


def meta_model(config: ModelConfig) -> PreTrainedModel:
    return build_meta_model(load_hf_config(config), dtype=torch.float32, attention="eager")


def counted(model: PreTrainedModel) -> int:
    """Return torch's count for one sequence, forward and backward, if all gradients are needed."""
    ids = torch.zeros(1, SEQUENCE, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="meta")
        model(input_ids=ids, attention_mask=mask).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["gpt2-tied", "llama-untied", "qwen3", "qwen2-grouped"])
def test_flops_of_layers_and_head_equal_the_count_of_torch(name: str) -> None:
    model = meta_model(MODELS[name])
    config, layers = model.config, find_layers(model)[1]
    ours = sum(layer_flops_per_token(layer, config, SEQUENCE) for layer in layers)
    ours += flops_of_modules([model.get_output_embeddings()])
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 8)
    # torch also counts the masked half of the scores.
    masked = 6 * SEQUENCE * width * len(layers)
    assert counted(model) == SEQUENCE * (ours + masked)


def test_lookup_tables_norms_and_biases_do_not_count() -> None:
    model = meta_model(MODELS["llama-untied"])
    assert matmul_parameters(model) == sum(p.numel() for p in model.parameters() if p.dim() == 2) - 98 * 32
    assert matmul_parameters(model.model.embed_tokens) == 0
    assert matmul_parameters(model.model.norm) == 0


def test_only_attention_grows_with_the_sequence() -> None:
    model = meta_model(MODELS["llama-untied"])
    layer = model.model.layers[0]
    short, long = (layer_flops_per_token(layer, model.config, length) for length in (128, 256))
    assert long - short == 6 * 128 * 32
    assert short - 6 * 128 * 32 == 6 * matmul_parameters(layer)


def test_flops_without_attention_heads() -> None:
    model = meta_model(ModelConfig(type="mamba", config={"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 98}))
    layer = find_layers(model)[1][0]
    assert layer_flops_per_token(layer, model.config, 4096) == 6 * matmul_parameters(layer)


def test_flops_with_a_separate_head_dim() -> None:
    model = meta_model(ModelConfig(type="mistral", config={**LLAMA, "head_dim": 16}))
    layer = model.model.layers[0]
    assert layer_flops_per_token(layer, model.config, 100) == 6 * matmul_parameters(layer) + 6 * 100 * 64


@pytest.mark.parametrize("model_type", EXPERTS)
def test_token_counts_the_experts_that_process_it(model_type: str) -> None:
    config, expected = EXPERTS[model_type]
    (layer,) = find_layers(meta_model(ModelConfig(type=model_type, config=config)))[1]
    assert matmul_parameters(layer) == expected


def test_number_of_chosen_experts_comes_from_the_configuration() -> None:
    sizes = {**LLAMA, "head_dim": 8, "num_hidden_layers": 1, "moe_intermediate_size": 16, "enable_moe_block": True}

    def parameters_of(chosen: int) -> float:
        config = {**sizes, "num_experts": 8, "top_k_experts": chosen}
        (layer,) = find_layers(meta_model(ModelConfig(type="gemma4_text", config=config)))[1]
        return matmul_parameters(layer)

    assert parameters_of(3) - parameters_of(1) == 2 * 3 * 32 * 16


def test_biases_of_experts_do_not_count() -> None:
    config = {**LLAMA, "num_hidden_layers": 1, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    (layer,) = find_layers(meta_model(ModelConfig(type="gpt_oss", config=config)))[1]
    assert matmul_parameters(layer.mlp) == 2 * 3 * 32 * 48 + 4 * 32
