"""Numbers in 8 bits, with a scale for each block: the dynamic map of 8-bit Adam.

A number is a level of the map times the largest absolute number of its block. Levels lie closer
together near zero: each of seven decades has twice as many as the decade below.

Source: 8-bit Optimizers via Block-wise Quantization (Dettmers et al., arXiv:2110.02861), and
`create_dynamic_map` of bitsandbytes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshtrain.config.optimizer import MOMENT_BLOCK

DECADES = 7
# A float32 has as many lower bits, and its upper ones are at most this number.
LOWER_BITS, UPPER = 16, 2**16 - 1


def levels_of(*, signed: bool) -> list[float]:
    """Return the 256 numbers of [-1, 1], or of [0, 1], that 8 bits stand for, in order."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        number = 2 ** (decade if signed else decade + 1)
        levels = [10.0 ** (decade + 1 - DECADES) * (0.1 + 0.9 * (at + 0.5) / number) for at in range(number)]
        found += [*levels, *(-level for level in levels)] if signed else levels
    return sorted(found)


class DynamicMap(NamedTuple):
    """The map on a device, in the number format of the computation.

    Attributes:
        levels: (256,), in order.
        borders: (256,) between each level and the next, and infinity. What lies on one belongs to
            the level below.
        guesses: (65536,) uint8: the upper 16 bits of a float32 -> the level of the lowest number
            that begins so. Its other numbers have the same level, or the next one.
    """

    levels: Tensor
    borders: Tensor
    guesses: Tensor

    def unpack(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the numbers (rows, width) that were packed.

        Args:
            codes: (rows, width) uint8.
            scales: (rows, blocks).
        """
        numbers = torch.take(self.levels, codes.long())
        _blocks(numbers).mul_(scales.unsqueeze(-1))
        return numbers

    def pack(self, numbers: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Round numbers to the nearest levels of their blocks.

        Args:
            numbers: (rows, width). They are overwritten.
            codes: (rows, width) uint8, is written.
            scales: (rows, blocks), is written.
        """
        blocks = _blocks(numbers)
        scales.copy_(blocks.abs().amax(-1))
        blocks.div_(torch.where(scales == 0, 1.0, scales).unsqueeze(-1))
        # On a CPU, `torch.bucketize` takes ten times as long.
        upper = numbers.to(torch.float32).view(torch.int32) >> LOWER_BITS & UPPER
        guesses = torch.take(self.guesses, upper.long())
        codes.copy_(guesses + (numbers > torch.take(self.borders, guesses.long())))


def _blocks(numbers: Tensor) -> Tensor:
    """Return a view (rows, blocks, numbers of a block)."""
    return numbers.unflatten(-1, (-1, MOMENT_BLOCK))


def dynamic_map(*, signed: bool, dtype: torch.dtype, device: torch.device) -> DynamicMap:
    """Return the map of numbers of both signs, or of numbers that are never negative.

    In the second one, only zero becomes zero, however small a number is. Otherwise a mean of
    squares could vanish while the mean of the gradients remains, and the quotient of the two would
    move the parameter far.
    """
    levels = torch.tensor(levels_of(signed=signed), dtype=torch.float64, device=device)
    borders = (levels[1:] + levels[:-1]) / 2
    if not signed:
        borders[0] = 0.0
    upper = torch.arange(UPPER + 1, device=device)
    # The lower bits of the lowest number are zeros, or ones if it is negative.
    lowest = (upper << LOWER_BITS) + (upper >> LOWER_BITS - 1) * UPPER
    guesses = torch.bucketize(lowest.int().view(torch.float32), borders.to(torch.float32)).to(torch.uint8)
    return DynamicMap(levels.to(dtype), F.pad(borders, (0, 1), value=torch.inf).to(dtype), guesses)
