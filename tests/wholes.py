"""Tiny multimodal models with random weights, written as their stock classes write them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from meshtrain.models.tiny import shrink

# Positions have three parts in these types: time, height and width.
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [24, 20, 20]}
# Values that published models of a type have, and its defaults have not.
WHOLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", {}),
    "gemma4": ("Gemma4ForConditionalGeneration", {"vision_config": {}}),
    "llama4": ("Llama4ForConditionalGeneration", {}),
    "mistral3": ("Mistral3ForConditionalGeneration", {"tie_word_embeddings": False}),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"text_config": {"rope_parameters": {**MROPE, "mrope_interleaved": True}}, "tie_word_embeddings": True},
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        {"text_config": {"rope_parameters": {**MROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}}},
    ),
}
VOCABULARY = 300


def whole_config(model_type: str, num_layers: int = 2) -> PretrainedConfig:
    """Return the tiny configuration of a whole model of a type."""
    architecture, values = WHOLES[model_type]
    config = shrink(CONFIG_MAPPING[model_type](**values), num_layers)
    text = config.get_text_config()
    for name in {"vocab_size", "vocab_size_per_layer_input"} & text.to_dict().keys():
        setattr(text, name, VOCABULARY)
    config.architectures = [architecture]
    return config


def build_whole(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a whole model with random weights. No two of them are equal, as in a trained model."""
    kind = getattr(transformers, config.architectures[0])
    model: PreTrainedModel = kind._from_config(config, dtype=dtype)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draws))
    return model.eval()


def write_whole(folder: Path, model_type: str, num_layers: int = 2, **options: Any) -> PreTrainedModel:
    """Write a whole model and the file of its processor."""
    model = build_whole(whole_config(model_type, num_layers))
    model.save_pretrained(folder, **options)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_size": 30}))
    return model


def load_whole(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a folder with the stock class that it names, and check that all weights are there."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    # The fused operators for experts do not support float64.
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model, report = getattr(transformers, name).from_pretrained(
        folder, dtype=dtype, output_loading_info=True, **options
    )
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    return model.eval()


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits of a model on text alone."""
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found
