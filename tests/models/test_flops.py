"""Counted FLOPs against those that torch counts while the layer runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_model, load_hf_config
from meshtrain.models.flops import head_flops_per_token, layer_flops_per_token, matmul_parameters
from meshtrain.parallel.anatomy import find_layers
from tests.parity import LLAMA, MODELS

SEQUENCE = 16


def meta_model(config: ModelConfig) -> PreTrainedModel:
    return build_model(load_hf_config(config), dtype=torch.float32, attention="eager")


def counted(model: PreTrainedModel) -> int:
    """Return what torch counts for one sequence, forward and backward, of the model whose gradients are all wanted."""
    ids = torch.zeros(1, SEQUENCE, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="meta")
        model(input_ids=ids, attention_mask=mask).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["gpt2-tied", "llama-untied", "qwen3", "qwen2-grouped"])
def test_all_layers_and_the_head_are_what_torch_counts(name: str) -> None:
    model = meta_model(MODELS[name])
    config, layers = model.config, find_layers(model)[1]
    ours = sum(layer_flops_per_token(layer, config, SEQUENCE) for layer in layers)
    ours += head_flops_per_token(model.get_output_embeddings())
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 8)
    # torch counts the masked half of the scores too.
    masked = 6 * SEQUENCE * width * len(layers)
    assert counted(model) == SEQUENCE * (ours + masked)


def test_lookup_tables_norms_and_biases_do_not_count() -> None:
    model = meta_model(MODELS["llama-untied"])
    assert matmul_parameters(model) == sum(p.numel() for p in model.parameters() if p.dim() == 2) - 98 * 32
    assert matmul_parameters(model.model.embed_tokens) == 0
    assert matmul_parameters(model.model.norm) == 0


def test_attention_grows_with_the_sequence_and_the_rest_does_not() -> None:
    model = meta_model(MODELS["llama-untied"])
    layer = model.model.layers[0]
    short, long = (layer_flops_per_token(layer, model.config, length) for length in (128, 256))
    assert long - short == 6 * 128 * 32
    assert short - 6 * 128 * 32 == 6 * matmul_parameters(layer)


def test_a_model_without_attention_heads() -> None:
    model = meta_model(ModelConfig(type="mamba", config={"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 98}))
    layer = find_layers(model)[1][0]
    assert layer_flops_per_token(layer, model.config, 4096) == 6 * matmul_parameters(layer)


def test_head_dim_of_its_own() -> None:
    model = meta_model(ModelConfig(type="mistral", config={**LLAMA, "head_dim": 16}))
    layer = model.model.layers[0]
    assert layer_flops_per_token(layer, model.config, 100) == 6 * matmul_parameters(layer) + 6 * 100 * 64
