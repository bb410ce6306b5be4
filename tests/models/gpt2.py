"""A small stock GPT-2, and which of its parameters are kept in parts.

The tests of files and of fused projections use it.
"""

from transformers import GPT2Config

from meshtrain.models.fused import FusedParameter

# torch's own arithmetic gets 13 uneven rows over dp_shard = 3 x tp = 2 wrong.
GPT2 = GPT2Config(vocab_size=13, n_positions=7, n_embd=10, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
FUSED = tuple(
    FusedParameter(f"{name}.{kind}", tuple(f"{name}.{part}.{kind}" for part in "qkv"), dim)
    for name in ("transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn")
    for kind, dim in (("weight", 1), ("bias", 0))
)
TIED = {"lm_head.weight": "transformer.wte.weight"}
