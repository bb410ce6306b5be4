"""Short hashes that show whether two processes hold the same tensor."""

import torch
import xxhash
from torch import Tensor


def tensor_digest(tensor: Tensor, *, most_elements: int | None = None) -> str:
    """Return 16 hexadecimal digits that depend on shape, number format and every element.

    Args:
        tensor: on any device. On meta, only shape and number format count.
        most_elements: hash about this number of evenly spaced elements instead of all.
    """
    hasher = xxhash.xxh3_64(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if not tensor.is_meta:
        flat = tensor.detach().reshape(-1)
        step = 1 if most_elements is None else max(1, flat.numel() // most_elements)
        hasher.update(flat[::step].cpu().contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()
