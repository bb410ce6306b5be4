"""The sizes of tiny configurations, under the names that the classes of transformers give them.

A size that a configuration lacks, or has as 0 or None, is left as it is, because 0 and None switch
something off.
"""

HEADS, HEAD_SIZE, HIDDEN, VOCABULARY, LENGTH, WINDOW = 4, 8, 32, 64, 32, 4
EXPERTS = 4
WIDTH_NAMES = (
    *("hidden_size", "n_embd", "d_model", "emb_dim", "word_embed_proj_dim", "lru_width"),
    *("dim_model", "embedding_size", "embed_dim", "input_embedding_size", "embedding_dim"),
)
HEAD_NAMES = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    *("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"),
    "swa_num_attention_heads",
)
_HEAD_SIZES = dict.fromkeys(
    (
        *("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim", "d_head"),
        *("rotary_dim", "swa_head_dim", "swa_v_head_dim", "index_head_dim", "dim_head"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_head_dim", "mamba_d_head"),
    ),
    HEAD_SIZE,
)
# Numbers of inputs of a projection that are not those of all heads.
_WIDTHS = {
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_ff"), 48),
    **dict.fromkeys(("dff", "dim_ff", "ffn_hidden_size", "intermediate_size_mlp", "d_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(
        ("shared_intermediate_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 16
    ),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "o_lora_rank", "qk_head_dim", "time_step_rank", "mamba_dt_rank"), 16
    ),
    "hidden_size_per_layer_input": 8,
    "laurel_rank": WINDOW,
    "mamba_d_ssm": 2 * HIDDEN,
}
_OTHERS = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCABULARY),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    "zero_expert_num": 2,
    # Experts are in two groups, and a token goes to one of them.
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("topk_group", "n_groups", "mamba_n_groups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_nextn_predict_layers",), 1),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(
        ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads", "mamba_n_heads"), HEADS
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "index_topk"), LENGTH),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "index_block_size"), WINDOW),
    # Blocks of keys that a query sees, and tokens after which queries grow (Llama 4).
    **dict.fromkeys(("index_topk_blocks", "floor_scale"), 2),
}


def sizes_of(heads: int, block: int = 1) -> dict[str, int]:
    """Return the sizes of a copy.

    Args:
        heads: number of attention heads.
        block: the numbers of inputs of projections are multiples of it. More than 1: as wide as two
            heads of the copy.
    """
    head_size = max(HEAD_SIZE, block // 2)
    return {
        **_OTHERS,
        **dict.fromkeys(_HEAD_SIZES, head_size),
        **{name: -(-size * head_size // HEAD_SIZE // block) * block for name, size in _WIDTHS.items()},
        **dict.fromkeys(WIDTH_NAMES, heads * head_size),
        **dict.fromkeys(HEAD_NAMES, heads),
    }


PART_SIZES = sizes_of(HEADS) | dict.fromkeys(("num_hidden_layers", "num_blocks", "depth"), 1)
"""Of the other models in a configuration, such as an image encoder."""
