"""The models of the parts: shapes of known models, and tiny ones with the same structure."""

from typing import Any

_LLAMA = {"type": "llama"}
_DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_TINY_LLAMA = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TINY: dict[str, Any] = {**_LLAMA, "config": _TINY_LLAMA}
TINY_GPT2: dict[str, Any] = {
    "type": "gpt2",
    "config": {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, **_DRY},
}
GPT2_124M: dict[str, Any] = {"type": "gpt2", "config": {"vocab_size": 50304, **_DRY}}
LLAMA_1B: dict[str, Any] = {
    **_LLAMA,
    "config": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
}
LLAMA_8B: dict[str, Any] = {
    **_LLAMA,
    "config": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
}
MIXED: dict[str, Any] = {"precision": {"compute": "bfloat16"}}
# With float32 parameters, the state of 8B parameters would need 128 GB.
PURE: dict[str, Any] = {
    "precision": {"parameters": "bfloat16", "compute": "bfloat16", "reduce": "bfloat16"},
    "recompute": {"mode": "full"},
}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    # name: model, plan, sequences of a microbatch, tokens of a sequence
    "GPT-2 124M": (GPT2_124M, MIXED, 16, 1024),
    "Llama 1B": (LLAMA_1B, {**MIXED, "recompute": {"mode": "full"}}, 4, 2048),
    "Llama 8B": (LLAMA_8B, PURE, 1, 2048),
}
SMALL_SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    name: (TINY_GPT2 if model is GPT2_124M else TINY, plan, 2, 64) for name, (model, plan, _, _) in SHAPES.items()
}
