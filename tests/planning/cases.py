"""Runs of small models on all kinds of meshes, to be simulated and to be measured."""

import math
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from meshtrain.compat.transformers import attention_implementation
from meshtrain.config.families import with_family
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import STOCK_ROUTER
from meshtrain.models.build import build_meta_model
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.planning.simulation.run import SimulatedRun

SEQUENCE = 128
_LLAMA = {
    "vocab_size": 8000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 8000, "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 512},
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 32},
    "mixtral": {**_LLAMA, "intermediate_size": 352, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Sizes that no number of processes divides, and three heads.
UNEVEN = {
    **_LLAMA,
    "vocab_size": 8001,
    "hidden_size": 246,
    "intermediate_size": 702,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
_DEEP = {**_LLAMA, "num_hidden_layers": 7}
# Models with so many layers that a simulation leaves some out.
DEEP_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**MODELS["gpt2"], "n_layer": 7},
    "llama": _DEEP,
    "qwen3": {**_DEEP, "head_dim": 32},
    "mixtral": {**MODELS["mixtral"], "num_hidden_layers": 7},
    # Every sixth layer attends to all tokens, the others to a few before.
    "gemma3_text": {**_DEEP, "head_dim": 32, "num_hidden_layers": 18, "sliding_window": 64},
    "deepseek_v3": {
        **_DEEP,
        "num_hidden_layers": 9,
        "first_k_dense_replace": 3,
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}
PLANS: dict[str, dict[str, Any]] = {
    "one process": {"mesh": {"dp_shard": 1}},
    "ddp": {"mesh": {"dp_replicate": 2, "dp_shard": 1}},
    "fsdp": {"mesh": {"dp_shard": 2}},
    "fsdp, bfloat16": {"mesh": {"dp_shard": 2}, "precision": {"compute": "bfloat16"}},
    "fsdp, recomputed": {"mesh": {"dp_shard": 2}, "recompute": {"mode": "full"}},
    "fsdp, level 2": {"mesh": {"dp_shard": 2}, "shard": {"level": 2}},
    "fsdp, level 2, bfloat16": {
        "mesh": {"dp_shard": 2},
        "shard": {"level": 2, "prefetch": 1},
        "precision": {"compute": "bfloat16"},
    },
    "fsdp, reduced each microbatch": {"mesh": {"dp_shard": 2}, "shard": {"reduce_gradients": "each_microbatch"}},
    "fsdp, two layers ahead": {"mesh": {"dp_shard": 2}, "shard": {"prefetch": 2}},
    "copies of fsdp, level 2": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "shard": {"level": 2}},
    "tp": {"mesh": {"tp": 2, "dp_shard": 1}},
    "tp, parts of the sequence": {"mesh": {"tp": 2, "dp_shard": 1}, "tensor": {"sequence_parallel": True}},
    "tp, selective": {"mesh": {"tp": 2, "dp_shard": 1}, "recompute": {"mode": "selective"}},
    "cp": {"mesh": {"cp": 2, "dp_shard": 1}},
    "cp x fsdp, gathered": {"mesh": {"cp": 2, "dp_shard": 2}, "context": {"method": "all_gather"}},
    "pp": {"mesh": {"pp": 2, "dp_shard": 1}},
    "pp, recomputed": {"mesh": {"pp": 2, "dp_shard": 1}, "recompute": {"mode": "full"}},
    "pp, interleaved": {
        "mesh": {"pp": 2, "dp_shard": 1},
        "pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
    },
    "pp, ZBV": {"mesh": {"pp": 2, "dp_shard": 1}, "pipeline": {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}},
    "pp, ZBV x fsdp, bfloat16": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "pipeline": {"schedule": "ZBVZeroBubble", "stages_per_rank": 2},
        "precision": {"compute": "bfloat16"},
    },
    "pp x fsdp": {"mesh": {"pp": 2, "dp_shard": 2}},
    "pp x fsdp, level 2": {"mesh": {"pp": 2, "dp_shard": 2}, "shard": {"level": 2}},
    "pp, interleaved x fsdp, level 2": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
        "shard": {"level": 2},
    },
    "pp, interleaved x fsdp": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
    },
    "pp, interleaved x fsdp, freed": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
        "shard": {"reshard_after_forward": "always"},
    },
    "pp x tp": {"mesh": {"pp": 2, "tp": 2, "dp_shard": 1}},
    "fsdp, float8": {"mesh": {"dp_shard": 2}, "precision": {"compute": "float8", "float8": {"skip": []}}},
    "fsdp, gathered in float8": {
        "mesh": {"dp_shard": 2},
        "precision": {"compute": "float8", "float8": {"skip": [], "recipe": "tensorwise"}},
    },
    "fsdp, mxfp8": {"mesh": {"dp_shard": 2}, "precision": {"compute": "float8", "float8": {"recipe": "mxfp8"}}},
    "pp x tp, float8, selective": {
        "mesh": {"pp": 2, "tp": 2, "dp_shard": 1},
        "precision": {"compute": "float8", "float8": {"recipe": "tensorwise"}},
        "recompute": {"mode": "selective"},
    },
}


def make_run(
    model_type: str,
    plan: dict[str, Any],
    *,
    microbatches: int = 4,
    values: dict[str, Any] | None = None,
    separates: bool = False,
) -> SimulatedRun:
    """Return a run with microbatches of two sequences.

    Args:
        values: of the configuration; None: those of `MODELS`.
        separates: whether rows are made of documents that do not see each other.
    """
    config = AutoConfig.for_model(model_type, **(MODELS[model_type] if values is None else values))
    config.bos_token_id = config.eos_token_id = 0
    return run_of(config, plan, microbatches=microbatches, separates=separates)


def run_of(
    config: PretrainedConfig, plan: dict[str, Any], *, microbatches: int, separates: bool = False
) -> SimulatedRun:
    """Return a run of a model with microbatches of two sequences."""
    model = build_meta_model(config, dtype=torch.float32, attention=None)
    wanted = with_family(ParallelPlan.model_validate(plan), config.model_type)
    world_size = math.prod(degree for degree in wanted.mesh.degrees.values() if degree > 0)
    mesh = wanted.mesh.resolve(world_size)
    length = min(SEQUENCE, getattr(config, "max_position_embeddings", SEQUENCE))
    batch = BatchShape(2 * microbatches * mesh.data_degree, 2, length, separates=separates)
    resolved = resolve_plan(wanted, model, batch, world_size)
    return SimulatedRun(
        router=STOCK_ROUTER,
        hf_config=config,
        attention=attention_implementation(model.config) or "eager",
        trust_remote_code=False,
        plan=resolved,
        batch=batch,
        inputs=("position_ids",) if separates else (),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
