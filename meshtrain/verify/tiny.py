"""The smallest configuration of a model class that still has every part of it."""

import math
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from meshtrain.errors import ModelError
from meshtrain.models.build import REFUSALS

HEADS, HEAD_SIZE, HIDDEN, VOCABULARY, LENGTH, WINDOW = 4, 8, 32, 64, 32, 4
# What the classes of transformers call their sizes. A size that a configuration does not have, or has as 0 or None, is
# left as it is: it switches something off.
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "word_embed_proj_dim", "lru_width"), HIDDEN),
    **dict.fromkeys(("dim_model", "embedding_size", "embed_dim", "input_embedding_size"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim"), HEAD_SIZE),
    **dict.fromkeys(("rotary_dim", "swa_head_dim", "swa_v_head_dim", "index_head_dim", "dim_head"), HEAD_SIZE),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_head_dim", "mamba_d_head"), HEAD_SIZE
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_ff"), 48),
    **dict.fromkeys(("dff", "dim_ff", "ffn_hidden_size", "intermediate_size_mlp", "d_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "time_step_rank", "mamba_dt_rank"), 16),
    **dict.fromkeys(
        ("n_group", "topk_group", "n_groups", "num_expert_group", "mamba_n_groups", "first_k_dense_replace"), 1
    ),
    **dict.fromkeys(("num_nextn_predict_layers",), 1),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(
        ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads", "mamba_n_heads"), HEADS
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "index_topk"), LENGTH),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "attention_chunk_size"), WINDOW),
    "num_kv_shared_layers": 0,
    "mamba_d_ssm": 2 * HIDDEN,
    "d_head": HEAD_SIZE,
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "laurel_rank"), WINDOW),
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "swa_num_key_value_heads")
LAYER_COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
# Width of the state over that of the model -> number of heads that it is split into.
STATE_HEADS = (("mamba_expand", "mamba_n_heads"), ("expand", "num_heads"), ("expand", "mamba_num_heads"))
# Defaults that are None although the class cannot be built so.
UNSET = {
    "head_dim": HEAD_SIZE,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
}
NOT_VALUES = ("model_type", "transformers_version", "architectures", "_name_or_path", "dtype", "auto_map")


def tiny_config(model_type: str, num_layers: int = 4) -> PretrainedConfig:
    """Return a tiny configuration of the text model of a type, made from its defaults.

    Raises:
        ModelError: if transformers refuses it: some sizes of a class depend on each other in a way of their own.
    """
    try:
        config = AutoConfig.for_model(model_type).get_text_config()
    except REFUSALS as error:
        raise ModelError(f"{model_type!r} has no defaults: {error}") from error
    # Not by attribute: some values are different in every layer, and such a configuration does not like to be asked.
    unset = {name for name, value in config.to_dict().items() if value is None}
    for name in unset & UNSET.keys():
        setattr(config, name, UNSET[name])
    return shrink(config, num_layers)


def shrink(config: PretrainedConfig, num_layers: int, *, tp: int = 1) -> PretrainedConfig:
    """Return a tiny configuration of the same class: kinds of layers, norms, activation, ties and experts stay.

    Args:
        config: of a text model; it is not changed.
        num_layers: of the copy. Every kind of layer is among them, if that is enough of them.
        tp: how many processes will share a layer of the model itself. If they must share key-value heads, or do not
            divide its vocabulary, so it will be with the copy on 2.

    Raises:
        ModelError: if transformers refuses it.
    """
    if not hasattr(config, "num_hidden_layers"):
        raise ModelError(f"a {config.model_type} configuration does not say how many layers there are")
    values = {name: value for name, value in config.to_dict().items() if name not in NOT_VALUES}
    kept = _kept_layers(config, num_layers)
    tiny = {name: _shrunk(name, value, kept, config.num_hidden_layers) for name, value in values.items()}
    tiny |= {_own_name(config, name): value for name, value in _heads(config, tp).items()}
    if getattr(config, "vocab_size", 0) % tp:
        tiny["vocab_size"] = VOCABULARY - 1
    tiny |= {_own_name(config, name): num_layers for name in LAYER_COUNTS if _own_name(config, name) in values}
    tiny |= {name: token for name, token in TOKENS.items() if values.get(name) is not None}
    try:
        return type(config)(**tiny)
    except (*REFUSALS, NotImplementedError) as error:
        raise ModelError(f"a {config.model_type} configuration cannot be made small: {error}") from error


def _own_name(config: PretrainedConfig, name: str) -> str:
    return config.attribute_map.get(name, name)


def _kept_layers(config: PretrainedConfig, num_layers: int) -> list[int]:
    """Return the indices of the layers to keep: the first of every kind, then the first of all."""
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    first_of_kind = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    order = [*first_of_kind, *(index for index in range(len(kinds)) if index not in first_of_kind)]
    return sorted(order[:num_layers])


def _shrunk(name: str, value: Any, kept: list[int], num_layers: int) -> Any:
    if isinstance(value, list) and len(value) == num_layers:
        return [value[index] for index in kept]
    if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
        return {place: value[index] for place, index in enumerate(kept) if index in value}
    if isinstance(value, float) and ("drop" in name or "jitter" in name):
        return 0.0
    if name in SIZES and isinstance(value, int) and value > 0:
        return min(SIZES[name], value)
    return value


def key_value_heads(config: PretrainedConfig) -> int | None:
    """Return how many key-value heads a model has, if its configuration says so."""
    values = config.to_dict()
    numbers = (values.get(_own_name(config, name)) for name in KEY_VALUE_HEADS)
    return next((number for number in numbers if isinstance(number, int) and number > 0), None)


def _heads(config: PretrainedConfig, tp: int) -> dict[str, int]:
    """Return the numbers of key-value heads (one, all, or some in between, as they were) and of state-space heads."""
    values = config.to_dict()
    heads = {name: values.get(_own_name(config, name)) for name in KEY_VALUE_HEADS}
    whole = config.num_attention_heads if hasattr(config, "num_attention_heads") else HEADS
    expand, name = next(((getattr(config, key), name) for key, name in STATE_HEADS if hasattr(config, key)), (0, ""))
    states = {name: int(expand * HIDDEN) // HEAD_SIZE} if getattr(config, name, None) else {}
    return states | {
        name: 1 if number < max(2, tp) else HEADS // min(2, math.ceil(whole / number))
        for name, number in heads.items()
        if isinstance(number, int) and number > 0
    }
