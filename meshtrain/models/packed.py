"""Weights of a frozen model in four bits (NF4, as in QLoRA), packed into parameters of their names.

A row of a weight becomes a row of bytes: two numbers in each byte, and a float32 for each block of
64 numbers. Their bytes are kept in the number format of the computation, so that FSDP2 shards and
gathers them as they are. Rows are packed by themselves, so that each process packs its own. The
numbers are those of bitsandbytes' NF4 without double quantization.

Source: QLoRA, Dettmers et al. (arXiv:2305.14314), section 3.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.nn import mix_in
from meshtrain.errors import Problem
from meshtrain.models.adapters import stock_name
from meshtrain.models.layout import local_tensor
from meshtrain.models.weight_readers import weights_read_by

BLOCK = 64
# A row fills numbers of any format up to 8 bytes.
ALIGNMENT = 8
# Quantiles of the normal distribution, scaled to [-1, 1].
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def row_bytes(width: int) -> int:
    """Return the number of bytes of a packed row of `width` numbers."""
    return -(-(width // 2 + 4 * width // BLOCK) // ALIGNMENT) * ALIGNMENT


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


def pack_projections(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the frozen projections of a model on the meta device keep packed weights, in place.

    Args:
        model: of a stage, without adapters.
        dtype: number format of the computation.
    """
    for _, module in list(packable(model)):
        shape = module.out_features, row_bytes(module.in_features) // dtype.itemsize
        module.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        mix_in(module, PackedProjection)


class PackedProjection:
    """Mixin for a Linear with a packed weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in) to (batch, seq, out)."""
        own: Any = self
        result: Tensor = _Product.apply(x, own.weight, own.in_features)  # type: ignore[no-untyped-call]
        return result if own.bias is None else result + own.bias


class _Product(torch.autograd.Function):
    """Multiplies by a packed weight, and keeps it packed for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.width = width
        return F.linear(x, unpack(packed, width, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (packed,), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ unpack(packed, ctx.width, gradient.dtype), None, None


def packed_projections(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each projection with a packed weight, and the FQN of the weight in the stock model."""
    for name, module in model.named_modules():
        if isinstance(module, PackedProjection):
            yield stock_name(f"{name}.weight"), module


def pack(weight: Tensor, packed: Tensor) -> None:
    """Pack a weight.

    Args:
        weight: (rows, in), in any number format.
        packed: (rows, packed row), receives it.
    """
    rows, width = weight.shape
    blocks = weight.to(torch.float32).view(rows, width // BLOCK, BLOCK)
    largest = blocks.abs().amax(-1)
    levels = torch.tensor(LEVELS, device=weight.device)
    # As bitsandbytes does: a division rounds otherwise, to another level where a number is between.
    scaled = blocks * (1 / torch.where(largest == 0, 1.0, largest)).unsqueeze(-1)
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).view(rows, width // 2, 2)
    content = torch.cat([codes[..., 0] << 4 | codes[..., 1], largest.view(torch.uint8).view(rows, -1)], dim=1)
    bytes_of_rows = packed.view(torch.uint8)
    bytes_of_rows[:, : content.shape[1]] = content
    # What fills up a row is the same on every process.
    bytes_of_rows[:, content.shape[1] :] = 0


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the weight (rows, width) that was packed."""
    content, device = packed.view(torch.uint8), packed.device
    # A copy to an accelerator waits for it. On the CPU, the tensors of a simulation are not kept.
    pairs = _pairs(device) if device.type == "cpu" else _kept_pairs(device)
    numbers = F.embedding(content[:, : width // 2].int(), pairs).view(-1, width // BLOCK, BLOCK)
    largest = content[:, width // 2 : width // 2 + 4 * width // BLOCK].contiguous().view(torch.float32)
    return (numbers * largest.unsqueeze(-1)).to(dtype).view(-1, width)


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


def unpacked(module: Any) -> Tensor:
    """Return the full weight of a projection that no other process shares."""
    return unpack(local_tensor(module.weight), module.in_features, module.weight.dtype)
