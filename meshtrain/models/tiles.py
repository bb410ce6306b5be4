"""Draw random numbers for a sharded tensor that are the same on every mesh.

Values are drawn tile by tile. A tile is a fixed block of the *global* tensor with its own random
stream, keyed by (seed, FQN, tile). A process draws only the tiles that overlap its shard, on the
CPU, so the result depends neither on the mesh nor on the kind of device.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from meshtrain.models.layout import local_indices, local_tensor

TILE_ROWS, TILE_COLUMNS = 64, 1024


def fill_tiles(tensor: Tensor, draw: Callable[[Tensor, torch.Generator], object], *, key: str) -> None:
    """Fill the local part of `tensor`; each tile of the global tensor is drawn from its own stream.

    Args:
        tensor: plain or DTensor, with any number of dimensions. It is written in place.
        draw: fills a float32 CPU tile (rows, columns) from a generator.
        key: identifies the tensor. Streams are keyed by it and by the position of the tile.
    """
    local = local_tensor(tensor)
    if local.numel() == 0:
        return
    sizes = [1] * (2 - tensor.dim()) + list(tensor.shape)
    indices = [torch.zeros(1, dtype=torch.long)] * (2 - tensor.dim()) + local_indices(tensor)
    if math.prod(sizes[-2:]) < TILE_ROWS * TILE_COLUMNS:
        # A convolution has a tiny matrix for each pair of channels: a million of them, in audio
        # encoders. They share tiles.
        sizes, indices = _as_matrix(sizes, indices)
    *leading, rows, columns = indices
    target = torch.empty([len(index) for index in indices], dtype=torch.float32)
    for position in itertools.product(*(range(len(index)) for index in leading)):
        matrix = [int(index[i]) for index, i in zip(leading, position, strict=True)]
        for row, local_rows in _overlapping_tiles(rows, TILE_ROWS):
            for column, local_columns in _overlapping_tiles(columns, TILE_COLUMNS):
                tile = torch.empty(
                    min(TILE_ROWS, sizes[-2] - row), min(TILE_COLUMNS, sizes[-1] - column), dtype=torch.float32
                )
                draw(tile, seeded_stream(f"{key}|{matrix}|{row}|{column}"))
                kept = tile[rows[local_rows] - row][:, columns[local_columns] - column]
                target[position][local_rows, local_columns] = kept
    local.copy_(target.view(local.shape))


def _as_matrix(sizes: Sequence[int], indices: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Return sizes and indices of a tensor whose dimensions after the first are one."""
    columns = indices[1]
    for size, index in zip(sizes[2:], indices[2:], strict=True):
        columns = (columns[:, None] * size + index).flatten()
    return [sizes[0], math.prod(sizes[1:])], [indices[0], columns]


def _overlapping_tiles(indices: Tensor, size: int) -> Iterator[tuple[int, slice]]:
    """Yield (start of tile, local slice) for the tiles that contain some of the global `indices`.

    Args:
        indices: ascending.
        size: of a tile along this dimension.
    """
    tiles = indices // size
    starts, counts = torch.unique_consecutive(tiles, return_counts=True)
    position = 0
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        yield start * size, slice(position, position + count)
        position += count


def seeded_stream(key: str) -> torch.Generator:
    """Return a stream of random numbers that depends only on the key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@contextmanager
def seeded_by(key: str) -> Iterator[None]:
    """Seed the random stream of the CPU by a key while the block runs, and then restore it."""
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` would seed GPUs too, and they are not restored.
        torch.default_generator.manual_seed(seeded_stream(key).initial_seed())
        yield
