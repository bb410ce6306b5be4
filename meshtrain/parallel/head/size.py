"""The number of tokens of a chunk of the head, for a plan that leaves it open."""

import torch
from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan

MOST_BYTES = 2**29
"""Bytes of all logits of a microbatch up to which they are computed at once."""
CHUNK_BYTES = 2**28
"""Bytes of the logits of a chunk, unless these are few tokens, or many chunks."""
FEWEST_TOKENS = 512
"""Smallest chunk: each chunk also adds to the gradient of the full head, which costs time."""
MOST_CHUNKS = 8
"""Chunks of a microbatch. A GPU waits for the host at the begin of each."""
_MULTIPLE = 128


def loss_dtype(plan: ParallelPlan) -> torch.dtype:
    """Return the number format in which a plan computes the loss."""
    return torch.float64 if plan.precision.compute == "float64" else torch.float32


def auto_chunk_tokens(plan: ParallelPlan, model: PreTrainedModel, tokens: int) -> int:
    """Return the number of tokens of a chunk, 0 if all logits may exist at once.

    Args:
        plan: with the degrees of its mesh.
        model: whose vocabulary is counted.
        tokens: of a microbatch.
    """
    shards = plan.mesh.tp if plan.tensor.loss_parallel else 1
    width = -(-model.config.get_text_config().vocab_size // shards)
    token_bytes = width * loss_dtype(plan).itemsize
    if tokens * token_bytes <= MOST_BYTES:
        return 0
    by_bytes: int = 2 ** ((CHUNK_BYTES // token_bytes).bit_length() - 1)
    by_number = -(-tokens // (MOST_CHUNKS * _MULTIPLE)) * _MULTIPLE
    return max(FEWEST_TOKENS, by_bytes, by_number)
