"""Inputs of a probe: a forward pass that only finds out what a model does."""

import torch
from torch import Tensor

PROBE_LENGTH = 3
"""Tokens of the sequence of a probe."""


def probe_ids(device: torch.device) -> Tensor:
    """Return the tokens of a probe, (1, `PROBE_LENGTH`)."""
    return torch.ones(1, PROBE_LENGTH, dtype=torch.long, device=device)


def probe_mask(device: torch.device, *, with_mask: bool) -> dict[str, Tensor]:
    """Return the attention mask of a probe as keyword arguments, none without a mask.

    The mask is 4-D: transformers reads the values of a 2-D mask, and meta tensors have none.
    """
    shape = (1, 1, PROBE_LENGTH, PROBE_LENGTH)
    return {"attention_mask": torch.ones(shape, dtype=torch.bool, device=device)} if with_mask else {}
