"""Small models with experts, and runs whose experts compute in float64."""

from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM, PretrainedConfig

from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.models.build import load_hf_config
from meshtrain.training import resolve as resolve_module
from meshtrain.training.distillation import teacher as teacher_module
from tests.training.runs import VOCABULARY, build_plan, train_here


def write_experts(path: Path, *, layers: int = 2, experts: int = 4, **changes: Any) -> None:
    """Write a model with experts in float64."""
    torch.manual_seed(layers)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, **changes}
    config = MixtralConfig(
        vocab_size=VOCABULARY, num_hidden_layers=layers, num_local_experts=experts, initializer_range=0.3, **sizes
    )
    MixtralForCausalLM(config).double().save_pretrained(path)


def experts_plan(**degrees: int) -> ParallelPlan:
    """Return a plan in float64."""
    mesh = MeshPlan(**{"dp_shard": 1, **degrees})
    return build_plan((1, 1, 1, 1)).model_copy(update={"mesh": mesh})


def train_eagerly(run: RunConfig) -> list[dict[str, Any]]:
    """Train with experts that compute in float64, which torch's grouped product cannot."""

    def load(config: ModelConfig) -> PretrainedConfig:
        found = load_hf_config(config)
        found._experts_implementation = "eager"
        return found

    teacher_module.load_hf_config = resolve_module.load_hf_config = load
    return train_here(run)
