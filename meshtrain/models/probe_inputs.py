"""Inputs of a probe: a forward pass that only finds out what a model does."""

import torch
from torch import Tensor

PROBE_LENGTH = 3
"""Tokens of the sequence of a probe."""


def probe_ids(device: torch.device, batch: int = 1, length: int = PROBE_LENGTH) -> Tensor:
    """Return the tokens of a probe, (batch, length)."""
    return torch.ones(batch, length, dtype=torch.long, device=device)


def probe_mask(device: torch.device, length: int = PROBE_LENGTH, *, with_mask: bool) -> dict[str, Tensor]:
    """Return the attention mask of a probe as keyword arguments, none without a mask.

    The mask is 4-D: transformers reads the values of a 2-D mask, and meta tensors have none.
    """
    shape = (1, 1, length, length)
    return {"attention_mask": torch.ones(shape, dtype=torch.bool, device=device)} if with_mask else {}
