"""Weights of a frozen model in four bits (NF4, as in QLoRA), packed into parameters of their names.

A row of a weight becomes a row of blocks, one for each 64 numbers. A block is 32 bytes, of two
numbers each, and a float32 by which the numbers are multiplied. Its bytes are kept in the number
format of the computation, so that FSDP2 shards and gathers them as they are. Blocks know nothing of
each other. So a packed weight can be cut like the weight itself: by rows, and by columns between
two blocks. The numbers are those of bitsandbytes' NF4 without double quantization.

Source: QLoRA, Dettmers et al. (arXiv:2305.14314), section 3.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.weight_readers import weights_read_by
from meshtrain.errors import Problem
from meshtrain.models.adapters import stock_name
from meshtrain.models.layout import local_tensor

BLOCK = 64
_CODE_BYTES = BLOCK // 2
BLOCK_BYTES = _CODE_BYTES + torch.float32.itemsize
# Quantiles of the normal distribution, scaled to [-1, 1].
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def packed_width(width: int, dtype: torch.dtype) -> int:
    """Return how many numbers of a format a row of `width` numbers is packed into.

    Args:
        width: a multiple of BLOCK.
        dtype: one of 8 bytes fills up each block with zeros.
    """
    return width // BLOCK * -(-BLOCK_BYTES // dtype.itemsize)


def unpacked_width(packed: Tensor) -> int:
    """Return how many numbers are packed into a row of `packed`, (rows, packed row)."""
    return packed.shape[1] * BLOCK // packed_width(BLOCK, packed.dtype)


def blocks_of(packed: Tensor) -> Tensor:
    """Return the bytes of the blocks of a packed weight, (rows, blocks, BLOCK_BYTES), as a view."""
    block_bytes = packed_width(BLOCK, packed.dtype) * packed.itemsize
    return packed.view(torch.uint8).unflatten(1, (-1, block_bytes))[..., :BLOCK_BYTES]


def packable(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield FQN and module of each frozen projection but the head, whose weight it alone reads.

    Args:
        model: without adapters.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for name, module in model.named_modules():
        # A class of its own may use its weight in another way.
        if type(module) is nn.Linear and module is not head and not module.weight.requires_grad:
            around, _, own = name.rpartition(".")
            if own not in weights_read_by(type(model.get_submodule(around))):
                yield name, module


def packing_problems(model: PreTrainedModel) -> list[Problem]:
    """Return why the projections of a frozen model without adapters cannot be packed."""
    key, advice = "lora.base = 'nf4'", "leave it out"
    kind = type(model).__name__
    if any(isinstance(module, Conv1D) for module in model.modules()):
        return [Problem(f"{key}: the projections of {kind} are Conv1D, and only Linear is packed", advice)]
    found = list(packable(model))
    if not found:
        return [Problem(f"{key}: {kind} has no projection that it uses as a whole, and no other is packed", advice)]
    return [
        Problem(f"{key}: {name} has {module.in_features} inputs, which are no multiple of {BLOCK}", advice)
        for name, module in found
        if module.in_features % BLOCK
    ][:1]


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply an input by a packed weight.

    Args:
        x: (batch, seq, in).
        packed: (out, packed row).
        bias: (out,).

    Returns:
        (batch, seq, out).
    """
    result: Tensor = _Product.apply(x, packed)  # type: ignore[no-untyped-call]
    return result if bias is None else result + bias


class PackedWeight:
    """Mixin for a projection whose weight is packed, and whose class multiplies by `product`."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(packed_linear)


class PackedLinear(PackedWeight):
    """Mixin for a stock Linear whose weight is packed."""

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in) to (batch, seq, out)."""
        own: Any = self
        return self.product(x, own.weight, own.bias)


class _Product(torch.autograd.Function):
    """Multiplies by a packed weight, and keeps it packed for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return F.linear(x, unpack(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (packed,), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ unpack(packed, gradient.dtype), None


def packed_projections(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each projection with a packed weight, and the FQN of the weight in the stock model."""
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            yield stock_name(f"{name}.weight"), module


def pack(weight: Tensor, packed: Tensor) -> None:
    """Pack a weight.

    Args:
        weight: (rows, in), in any number format.
        packed: (rows, packed row), receives it.
    """
    blocks = weight.to(torch.float32).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    levels = torch.tensor(LEVELS, device=weight.device)
    # As bitsandbytes does: a division rounds otherwise, to another level where a number is between.
    scaled = blocks * (1 / torch.where(largest == 0, 1.0, largest))
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    # What fills up a block is the same on every process.
    packed.zero_()
    content = blocks_of(packed)
    content[..., :_CODE_BYTES] = codes[..., ::2] << 4 | codes[..., 1::2]
    content[..., _CODE_BYTES:] = largest.view(torch.uint8)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (rows, in) that was packed."""
    content, device = blocks_of(packed), packed.device
    # A copy to an accelerator waits for it. On the CPU, the tensors of a simulation are not kept.
    pairs = _pairs(device) if device.type == "cpu" else _kept_pairs(device)
    numbers = F.embedding(content[..., :_CODE_BYTES].int(), pairs).flatten(-2)
    largest = content[..., _CODE_BYTES:].contiguous().view(torch.float32)
    return numbers.mul_(largest).to(dtype).flatten(1)


def _pairs(device: torch.device) -> Tensor:
    """Return both numbers of each byte, (256, 2)."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)


_kept_pairs = functools.cache(_pairs)


@torch.no_grad()
def clear_packed(model: nn.Module) -> None:
    """Set packed weights to zero: random bits may be no numbers."""
    for _, module in packed_projections(model):
        local_tensor(module.weight).zero_()
