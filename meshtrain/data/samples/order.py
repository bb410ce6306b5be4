"""Which samples make up which step: a pure function of the seed and the step number.

Nothing is drawn and nothing is remembered, so the whole state of the data is one integer, the step, and the global
batch of a step is the same on any number of processes. The shuffle is a Feistel network: a permutation of all samples
that is computed where it is needed, one sample at a time, and never stored.

Source: format-preserving shuffles by cycle walking, Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import numpy as np

FILLER = -1
"""The sample id of a row that fills up the last batch of an epoch: pads, on which nothing is trained."""

ROUNDS = 6


class Order(Protocol):
    """Which samples make up which step."""

    @property
    def global_batch_size(self) -> int:
        """Samples in one step, over all processes."""
        ...

    @property
    def num_steps(self) -> int | None:
        """The number of steps there are; None: without end."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps in an epoch; None: there are no epochs."""
        ...

    def epoch(self, step: int) -> int:
        """Return the epoch that `step` (from 0) belongs to, from 0."""
        ...

    def sample_ids(self, step: int) -> np.ndarray:
        """Return the samples of `step` (from 0): (global_batch,) int64."""
        ...

    def samples_before(self, step: int) -> dict[str, int]:
        """Return source -> its samples in all steps before `step`; empty where there is one source only."""
        ...

    def count(self, sample_ids: np.ndarray) -> dict[str, int]:
        """Return source -> how many of the samples are its; empty where there is one source only."""
        ...


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

    @property
    def num_steps(self) -> int | None:
        """None: there is always another epoch."""
        return None

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
                positions[is_sample], self.num_samples, keys=derive_round_keys(f"{self.seed}/{epoch}")
            )
        positions[~is_sample] = FILLER
        return positions

    def samples_before(self, step: int) -> dict[str, int]:
        """Return nothing: there is one source only."""
        return {}

    def count(self, sample_ids: np.ndarray) -> dict[str, int]:
        """Return nothing: there is one source only."""
        return {}


class GroupedOrder:
    """Another order, but for the samples of a few steps that are sorted by length among each other, for fewer pads.

    The steps of a group come in an order of their own, so that batches do not grow longer and longer.

    Args:
        order: whose steps are grouped; a group never reaches over the end of an epoch.
        lengths: (n,) sample ids -> (n,) lengths.
        group: steps in a group.
        seed: another seed, another order of the steps of a group.
    """

    def __init__(self, order: Order, lengths: Callable[[np.ndarray], np.ndarray], *, group: int, seed: int) -> None:
        self.global_batch_size = order.global_batch_size
        self.num_steps, self.steps_per_epoch = order.num_steps, order.steps_per_epoch
        self._order, self._lengths, self._group, self._seed = order, lengths, group, seed
        self._sorted_group = lru_cache(2)(self._sort_group)

    def epoch(self, step: int) -> int:
        """Return the epoch that `step` (from 0) belongs to, from 0."""
        return self._order.epoch(step)

    def sample_ids(self, step: int) -> np.ndarray:
        """Return the samples of `step` (from 0): (global_batch,) int64."""
        first, num_steps = self._group_of(step)
        return self._sorted_group(first, num_steps)[step - first]

    def samples_before(self, step: int) -> dict[str, int]:
        """Return source -> its samples in all steps before `step`."""
        first, num_steps = self._group_of(step)
        before = self._order.samples_before(first)
        here = self.count(self._sorted_group(first, num_steps)[: step - first].ravel()) if step > first else {}
        return {source: count + here.get(source, 0) for source, count in before.items()}

    def count(self, sample_ids: np.ndarray) -> dict[str, int]:
        """Return source -> how many of the samples are its."""
        return self._order.count(sample_ids)

    def _group_of(self, step: int) -> tuple[int, int]:
        """Return the first step of the group that a step is in, and the number of its steps."""
        begin, end = 0, self.num_steps
        if self.steps_per_epoch is not None:
            begin = step - step % self.steps_per_epoch
            end = begin + self.steps_per_epoch
        first = step - (step - begin) % self._group
        return first, self._group if end is None else min(self._group, end - first)

    def _sort_group(self, first: int, num_steps: int) -> np.ndarray:
        ids = np.concatenate([self._order.sample_ids(step) for step in range(first, first + num_steps)])
        batches = ids[np.lexsort((ids, self._lengths(ids)))].reshape(num_steps, self.global_batch_size)
        return batches[permute(np.arange(num_steps), num_steps, keys=derive_round_keys(f"{self._seed}/groups/{first}"))]


def find_data_step(step: int, left_out: Iterable[int]) -> int:
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


def derive_round_keys(name: str) -> list[np.uint64]:
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
