"""Numbers in 8 bits: the levels of 8-bit Adam, and the nearest one of a block."""

import pytest
import torch
from torch import Tensor

from meshtrain.config.optimizer import MOMENT_BLOCK
from meshtrain.training.dynamic_map import DynamicMap, dynamic_map, levels_of

WIDTH = 2 * MOMENT_BLOCK


def map_of(*, signed: bool, dtype: torch.dtype = torch.float32) -> DynamicMap:
    return dynamic_map(signed=signed, dtype=dtype, device=torch.device("cpu"))


def nearest(values: Tensor, *, signed: bool) -> Tensor:
    """Return the nearest levels of the blocks, found by comparing with each one."""
    levels = torch.tensor(levels_of(signed=signed), dtype=values.dtype)
    blocks = values.unflatten(-1, (-1, MOMENT_BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True)
    numbers = blocks / scales.where(scales > 0, 1.0)
    codes = (numbers.unsqueeze(-1) - levels).abs().argmin(-1)
    if not signed:
        codes = codes.clamp(min=1).where(numbers > 0, 0)
    return (levels[codes] * scales).flatten(-2)


@pytest.mark.parametrize(
    ("signed", "some"),
    [
        # As `create_dynamic_map` of bitsandbytes 0.50 and torchao 0.18 has them.
        (True, {0: -0.9929687976837158, 126: -5.5e-7, 127: 0.0, 128: 5.5e-7, 200: 0.23359374701976776, 255: 1.0}),
        (False, {0: 0.0, 1: 3.25e-7, 2: 7.75e-7, 127: 0.103515625, 254: 0.9964843988418579, 255: 1.0}),
    ],
)
def test_levels_are_those_of_8_bit_adam(signed: bool, some: dict[int, float]) -> None:
    levels = levels_of(signed=signed)
    assert len(levels) == 256 == len({*levels})
    assert levels == sorted(levels)
    assert {index: levels[index] for index in some} == pytest.approx(some, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signed", [True, False])
def test_numbers_become_the_nearest_levels_of_their_block(signed: bool, dtype: torch.dtype) -> None:
    stream = torch.Generator().manual_seed(0)
    # From very small to very large, and a block of zeros.
    exponents = torch.randint(-9, 9, (6, WIDTH), generator=stream)
    values = torch.randn(6, WIDTH, generator=stream, dtype=dtype) * 10.0**exponents
    values[2, :MOMENT_BLOCK] = 0
    values = values if signed else values.abs()
    codes, scales = torch.zeros(6, WIDTH, dtype=torch.uint8), torch.zeros(6, 2, dtype=dtype)
    found = map_of(signed=signed, dtype=dtype)
    found.pack(values.clone(), codes, scales)
    assert torch.equal(scales, values.unflatten(-1, (2, -1)).abs().amax(-1))
    assert torch.equal(found.unpack(codes, scales), nearest(values, signed=signed))
    if not signed:
        assert torch.equal(found.unpack(codes, scales) > 0, values > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signed", [True, False])
def test_numbers_beside_every_border_get_the_level_of_their_side(signed: bool, dtype: torch.dtype) -> None:
    """The levels are guessed from half of the bits, and then corrected."""
    found = map_of(signed=signed, dtype=dtype)
    borders = found.borders[:-1]
    up, down = (torch.nextafter(borders, torch.tensor(to, dtype=dtype)) for to in (torch.inf, -torch.inf))
    # With a number of 1 in each block, the scale is 1.
    rows = torch.ones(3, 5 * MOMENT_BLOCK, dtype=dtype)
    places = torch.arange(rows.shape[1]).unflatten(0, (5, -1))[:, 1:].flatten()[: len(borders)]
    for row, numbers in enumerate((down, borders, up)):
        rows[row, places] = numbers if signed else numbers.clamp(min=0)
    codes, scales = torch.zeros(rows.shape, dtype=torch.uint8), torch.ones(3, 5, dtype=dtype)
    found.pack(rows, codes, scales)
    level = torch.arange(len(borders))
    assert torch.equal(scales, torch.ones_like(scales))
    assert [torch.equal(codes[row, places].long(), level + add) for row, add in enumerate((0, 0, 1))] == [True] * 3
