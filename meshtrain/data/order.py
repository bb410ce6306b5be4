"""Which samples make up which step: a pure function of the seed and the step number.

Nothing is drawn and nothing is remembered, so the whole state of the data is one integer, the step, and the global
batch of a step is the same on any number of processes. The shuffle is a Feistel network: a permutation of all samples
that is computed where it is needed, one sample at a time, and never stored.

Source: format-preserving shuffles by cycle walking, Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).
"""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

FILLER = -1
"""The sample id of a row that fills up the last batch of an epoch: pads, on which nothing is trained."""

ROUNDS = 6


class SampleOrder:
    """The sample ids of every step, for as many epochs as are asked for.

    Args:
        num_samples: samples in one epoch, 1 or more.
        global_batch_size: samples in one step, over all processes.
        seed: another seed, another shuffle.
        shuffle: visit the samples of each epoch in an order of its own; otherwise as they are stored.
        drop_last: leave out the samples of an epoch that do not fill a batch; otherwise FILLER fills their batch up.
    """

    def __init__(
        self, num_samples: int, *, global_batch_size: int, seed: int = 0, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        full, rest = divmod(num_samples, global_batch_size)
        self.steps_per_epoch = full if drop_last or not rest else full + 1
        assert self.steps_per_epoch > 0, "check_enough comes before the order"

    def epoch(self, step: int) -> int:
        """Return the epoch that `step` (from 0) belongs to, from 0."""
        return step // self.steps_per_epoch

    def sample_ids(self, step: int) -> np.ndarray:
        """Return the samples of `step` (from 0): (global_batch,) int64."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.global_batch_size
        positions = np.arange(start, start + self.global_batch_size, dtype=np.int64)
        is_sample = positions < self.num_samples
        if self.shuffle:
            positions[is_sample] = permute(
                positions[is_sample], self.num_samples, keys=_round_keys(f"{self.seed}/{epoch}")
            )
        positions[~is_sample] = FILLER
        return positions


def place_in_data(step: int, left_out: Iterable[int]) -> int:
    """Return the place in the data of the batch of `step`, both from 0: the places left out are passed over.

    Args:
        left_out: ascending.
    """
    place = step
    for missing in left_out:
        if missing > place:
            break
        place += 1
    return place


def permute(positions: np.ndarray, num_samples: int, *, keys: list[np.uint64]) -> np.ndarray:
    """Map each position to its place in a pseudo-random permutation of range(num_samples).

    Args:
        positions: (n,) int64, each in range(num_samples).
        keys: one per round; they choose the permutation.

    Returns:
        (n,) int64, in range(num_samples); different positions give different results.
    """
    half_bits = (max(2, (num_samples - 1).bit_length()) + 1) // 2
    values = _feistel(positions.astype(np.uint64), np.uint64(half_bits), keys)
    # The network permutes the next power of four. Walking on from a value outside leads back inside before it repeats.
    outside = values >= num_samples
    while outside.any():
        values[outside] = _feistel(values[outside], np.uint64(half_bits), keys)
        outside = values >= num_samples
    return values.astype(np.int64)


def _round_keys(name: str) -> list[np.uint64]:
    digests = (blake2b(f"{name}/{number}".encode(), digest_size=8).digest() for number in range(ROUNDS))
    return [np.uint64(int.from_bytes(digest, "little")) for digest in digests]


def _feistel(values: np.ndarray, half_bits: np.uint64, keys: list[np.uint64]) -> np.ndarray:
    mask = np.uint64((1 << int(half_bits)) - 1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half_bits) | right


def _mix(values: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = values * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return mixed
