"""The order of samples: a pure function of the seed and the step number.

No random state is kept. So the whole state of the data is one integer, the step, and the global
batch of a step is the same for any number of processes. The shuffle is a Feistel network: a
permutation of all samples that is computed for one sample at a time, and never stored.

Source: format-preserving shuffles by cycle walking, Black and Rogaway, "Ciphers with Arbitrary
Finite Domains" (2002).
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import numpy as np

FILLER = -1
"""The sample id of a row that completes the last batch of an epoch with pads.

It is not trained on.
"""

ROUNDS = 6


class Order(Protocol):
    """Assigns samples to steps."""

    @property
    def global_batch_size(self) -> int:
        """Samples in one step, over all processes; the first steps may have fewer."""
        ...

    @property
    def num_steps(self) -> int | None:
        """The number of steps; None: there is no end."""
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

    def num_samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before `step`."""
        ...

    def samples_before(self, step: int) -> dict[str, int]:
        """Return source -> its number of samples before `step`; empty for a single source."""
        ...

    def count(self, sample_ids: np.ndarray) -> dict[str, int]:
        """Return source -> its number of samples among `sample_ids`; empty for a single source."""
        ...


class SampleOrder:
    """The sample ids of every step, for any number of epochs.

    Args:
        num_samples: samples in one epoch, 1 or more.
        global_batch_size: samples in one step, over all processes.
        seed: decides the shuffle.
        shuffle: visit the samples of each epoch in a new order; otherwise as they are stored.
        drop_last: leave out the samples of an epoch that do not fill a batch; otherwise FILLER
            completes it.
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
        assert self.steps_per_epoch > 0, "check_enough runs before an order is built"

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

    def num_samples_before(self, step: int) -> int:
        """Return the number of samples, and of rows without one, in all steps before `step`."""
        return step * self.global_batch_size

    def samples_before(self, step: int) -> dict[str, int]:
        """Return nothing: there is only one source."""
        return {}

    def count(self, sample_ids: np.ndarray) -> dict[str, int]:
        """Return nothing: there is only one source."""
        return {}


class GroupedOrder:
    """Another order, in which the samples of a few steps are sorted by length, for fewer pads.

    The steps of a group are shuffled, so that batches do not grow longer and longer.

    Args:
        order: the order whose steps are grouped; a group never crosses the end of an epoch.
        lengths: (n,) sample ids -> (n,) lengths.
        group: steps in a group.
        seed: decides the order of the steps within a group.
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

    def num_samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before `step`."""
        return self._order.num_samples_before(step)

    def samples_before(self, step: int) -> dict[str, int]:
        """Return source -> its number of samples in all steps before `step`."""
        first, num_steps = self._group_of(step)
        before = self._order.samples_before(first)
        here = self.count(self._sorted_group(first, num_steps)[: step - first].ravel()) if step > first else {}
        return {source: count + here.get(source, 0) for source, count in before.items()}

    def count(self, sample_ids: np.ndarray) -> dict[str, int]:
        """Return source -> its number of samples among `sample_ids`."""
        return self._order.count(sample_ids)

    def _group_of(self, step: int) -> tuple[int, int]:
        """Return the first step of the group of a step, and the number of steps in the group."""
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
    """Return the index of the batch of `step`, both from 0, when some batches are left out.

    Args:
        left_out: indices of batches that no step reads, ascending.
    """
    data_step = step
    for skipped in left_out:
        if skipped > data_step:
            break
        data_step += 1
    return data_step


def permute(positions: np.ndarray, num_samples: int, *, keys: list[np.uint64]) -> np.ndarray:
    """Map each position to its image under a pseudo-random permutation of range(num_samples).

    Args:
        positions: (n,) int64, each in range(num_samples).
        keys: one per round; they choose the permutation.

    Returns:
        (n,) int64, in range(num_samples); different positions have different images.
    """
    half_bits = (max(2, (num_samples - 1).bit_length()) + 1) // 2
    values = _feistel(positions.astype(np.uint64), np.uint64(half_bits), keys)
    # The network permutes the next power of four. Repeating it for a value outside always leads
    # back inside.
    outside = values >= num_samples
    while outside.any():
        values[outside] = _feistel(values[outside], np.uint64(half_bits), keys)
        outside = values >= num_samples
    return values.astype(np.int64)


def derive_round_keys(name: str) -> list[np.uint64]:
    """Return the keys of the permutation with this name."""
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
