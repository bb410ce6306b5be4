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
LLAMA_WIDE: dict[str, Any] = {
    # Four layers of the 8B shape.
    **_LLAMA,
    "config": {**LLAMA_8B["config"], "num_hidden_layers": 4, "vocab_size": 32000},
}
LLAMA_HEAD: dict[str, Any] = {
    # Little besides a large vocabulary.
    **_LLAMA,
    "config": {**LLAMA_1B["config"], "num_hidden_layers": 1, "vocab_size": 131072, "max_position_embeddings": 4096},
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
COMPILED: dict[str, Any] = {**MIXED, "compile": {"enabled": True}}


def traced(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the plan without generated code, which needs a compiler and takes minutes on a CPU."""
    return plan | {"compile": {"enabled": True, "backend": "aot_eager"}} if "compile" in plan else plan


def in_float8(recipe: str) -> dict[str, Any]:
    """Return a compiled plan that computes in float8."""
    return {**COMPILED, "precision": {"compute": "float8", "float8": {"recipe": recipe, "skip": []}}}


COMPARED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, int]] = {
    # name: model, plan, the plan beside it, sequences of a microbatch, tokens of a sequence
    "compiled layers": (LLAMA_1B, COMPILED, MIXED, 4, 2048),
    **{f"float8, {recipe}": (LLAMA_WIDE, in_float8(recipe), COMPILED, 4, 2048) for recipe in ("rowwise", "tensorwise")},
    "recomputed layers": (LLAMA_1B, {**MIXED, "recompute": {"mode": "full"}}, MIXED, 4, 2048),
    "head in chunks": (LLAMA_HEAD, MIXED, {**MIXED, "loss": {"chunk_tokens": 0}}, 1, 4096),
    "documents alone": (
        LLAMA_WIDE,
        {**MIXED, "attention": {"documents": "segments"}},
        {**MIXED, "attention": {"documents": "mask"}},
        1,
        8192,
    ),
}
"""Two plans that compute the same."""

TIMED = SHAPES | {
    f"{name}, compiled": (model, {**plan, "compile": {"enabled": True}}, rows, length)
    for name, (model, plan, rows, length) in SHAPES.items()
    if name != "Llama 8B"
}
SMALL_TIMED = SMALL_SHAPES | {
    name: (TINY, traced(plan), 2, 64) for name, (_, plan, _, _) in TIMED.items() if "compile" in plan
}
