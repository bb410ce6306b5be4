"""Mixtures: one sequence of samples from several sources, each with its share.

Which sample comes when is a pure function of the seed and the step number. The sequence is cut into
blocks. Each source has a fixed number of samples in every block, its quota, at positions that a
permutation of the block chooses. So the shares hold within a few blocks and not only on average.
The n-th sample is found without those before it, and the number of samples of a source before it is
arithmetic. When a source ends, the quotas change. So the sequence has several phases, which are
known from the start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshtrain.data.samples.order import derive_round_keys, permute
from meshtrain.errors import DataError

MAX_BLOCK_SAMPLES = 10_000
"""The largest block.

Shares are exact to one sample of it; a source with a smaller share is refused.
"""
MIN_BLOCK_SAMPLES = 64
"""The smallest block. In a smaller one, the sources would repeat in nearly the same order."""
BLOCKS_KEPT = 8


@dataclass(frozen=True)
class MixedSource:
    """One source of a mixture.

    Attributes:
        name: it also decides the shuffle.
        num_samples: samples in one pass over it.
        weight: its share, relative to the weights of the others.
        repeats: start again at its end; otherwise the others continue without it.
        shuffle: visit the samples of each pass in a new order; otherwise as they are stored.
    """

    name: str
    num_samples: int
    weight: float = 1.0
    repeats: bool = True
    shuffle: bool = True


@dataclass(frozen=True)
class _Phase:
    """Blocks with the same quotas.

    Attributes:
        start: the index of its first sample in the mixture.
        quotas: (sources,) int64: samples of each source in a block.
        used: (sources,) int64: samples of each source before the phase.
        num_blocks: None: the phase never ends.
    """

    number: int
    start: int
    quotas: np.ndarray
    used: np.ndarray
    num_blocks: int | None

    @property
    def block_size(self) -> int:
        return int(self.quotas.sum())


class MixtureOrder:
    """The sample ids of every step of a mixture.

    The id of a sample is its index in its source plus the number of samples in the sources before
    that.

    Args:
        sources: 1 or more.
        global_batch_size: samples in one step, over all processes.
        seed: decides the order.

    Raises:
        DataError: if the share of a source is too small.
    """

    def __init__(self, sources: Sequence[MixedSource], *, global_batch_size: int, seed: int = 0) -> None:
        self.global_batch_size = global_batch_size
        self._sources = tuple(sources)
        self._seed = seed
        self._offsets = np.cumsum([0, *(source.num_samples for source in sources)])
        self._phases, self._num_samples = _build_phases(self._sources)
        self._starts = np.array([phase.start for phase in self._phases], np.int64)
        self._positions_in_block = lru_cache(BLOCKS_KEPT)(self._arrange_block)

    @property
    def num_steps(self) -> int | None:
        """The number of full steps; None: there is no end."""
        return None if self._num_samples is None else self._num_samples // self.global_batch_size

    @property
    def steps_per_epoch(self) -> None:
        """None: a mixture has no epochs, because each source has its own."""
        return None

    def epoch(self, step: int) -> int:
        """Return 0: a mixture has no epochs."""
        return 0

    def sample_ids(self, step: int) -> np.ndarray:
        """Return the samples of `step` (from 0): (global_batch,) int64."""
        sources, indices = self._locate(np.arange(self.global_batch_size) + step * self.global_batch_size)
        ids = np.empty_like(indices)
        for number in np.unique(sources):
            chosen = sources == number
            ids[chosen] = self._offsets[number] + self._shuffled(self._sources[number], indices[chosen])
        return ids

    def num_samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before `step`."""
        return step * self.global_batch_size

    def samples_before(self, step: int) -> dict[str, int]:
        """Return source -> its samples in all steps before `step`."""
        end = step * self.global_batch_size
        phase = self._phases[int(np.searchsorted(self._starts, end, "right")) - 1]
        block, position = divmod(end - phase.start, phase.block_size)
        counts = phase.used + block * phase.quotas
        if position:
            counts = counts + np.bincount(
                self._positions_in_block(phase.number, block)[0][:position], minlength=len(counts)
            )
        return {source.name: int(count) for source, count in zip(self._sources, counts, strict=True)}

    def count(self, sample_ids: np.ndarray) -> dict[str, int]:
        """Return source -> its number of samples among `sample_ids`."""
        numbers = np.searchsorted(self._offsets[1:], sample_ids, "right")
        counts = np.bincount(numbers, minlength=len(self._sources))
        return {source.name: int(count) for source, count in zip(self._sources, counts, strict=True)}

    def _locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources of positions in the mixture, (n,), and the indices within them."""
        sources, indices = np.empty_like(positions), np.empty_like(positions)
        phases = np.searchsorted(self._starts, positions, "right") - 1
        for phase in (self._phases[number] for number in np.unique(phases)):
            in_phase = phases == phase.number
            blocks, rest = np.divmod(positions[in_phase] - phase.start, phase.block_size)
            found_sources, found_indices = np.empty_like(blocks), np.empty_like(blocks)
            for block in np.unique(blocks):
                here = blocks == block
                block_sources, ranks = self._positions_in_block(phase.number, int(block))
                found_sources[here] = block_sources[rest[here]]
                before = phase.used + block * phase.quotas
                found_indices[here] = before[found_sources[here]] + ranks[rest[here]]
            sources[in_phase], indices[in_phase] = found_sources, found_indices
        return sources, indices

    def _arrange_block(self, phase: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position of a block, and how many earlier ones it has."""
        quotas = self._phases[phase].quotas
        size = int(quotas.sum())
        order = permute(np.arange(size), size, keys=derive_round_keys(f"{self._seed}/mixture/{phase}/{block}"))
        sources = np.searchsorted(np.cumsum(quotas), order, "right")
        ranks = np.empty_like(sources)
        for number in np.flatnonzero(quotas):
            ranks[sources == number] = np.arange(quotas[number])
        return sources, ranks

    def _shuffled(self, source: MixedSource, indices: np.ndarray) -> np.ndarray:
        epochs, positions = np.divmod(indices, source.num_samples)
        if source.shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                keys = derive_round_keys(f"{self._seed}/{source.name}/{epoch}")
                positions[here] = permute(positions[here], source.num_samples, keys=keys)
        return positions


def compute_quotas(weights: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return the samples of each source in a block: (sources,) int64; 0 where the weight is 0.

    The block is the smallest one in which all shares are whole numbers, repeated if it is very
    small. If there is none, it is the largest block, with each share rounded.

    Raises:
        DataError: if a source has less than one sample in the largest block.
    """
    shares = weights / weights.sum()
    if (found := np.flatnonzero((shares > 0) & (shares * MAX_BLOCK_SAMPLES < 1))).size:
        raise DataError(
            f"data.sources.{names[found[0]]}.weight is {shares[found[0]]:.1e} of all weights, and a mixture supports "
            f"shares of 1 in {MAX_BLOCK_SAMPLES:,} or more",
            "raise it, or leave the source out",
        )
    sizes = np.arange(1, MAX_BLOCK_SAMPLES + 1)
    exact = shares[:, None] * sizes
    is_integral = (np.abs(exact - exact.round()) < 1e-9 * sizes).all(0)
    if is_integral.any():
        size = int(sizes[is_integral.argmax()])
        return (shares * size).round().astype(np.int64) * -(-MIN_BLOCK_SAMPLES // size)
    quotas = np.floor(shares * MAX_BLOCK_SAMPLES).astype(np.int64)
    short = MAX_BLOCK_SAMPLES - int(quotas.sum())
    remainders = np.where(shares > 0, shares * MAX_BLOCK_SAMPLES - quotas, -1.0)
    quotas[np.argsort(-remainders, kind="stable")[:short]] += 1
    return quotas


def _build_phases(sources: Sequence[MixedSource]) -> tuple[list[_Phase], int | None]:
    """Return the phases and the total number of samples; None: the last phase never ends."""
    names = [source.name for source in sources]
    weights = np.array([source.weight for source in sources])
    sizes = np.array([source.num_samples for source in sources])
    ends = np.array([not source.repeats for source in sources])
    used, start = np.zeros(len(sources), np.int64), 0
    phases: list[_Phase] = []

    def add(quotas: np.ndarray, num_blocks: int | None) -> None:
        nonlocal start, used
        phases.append(_Phase(len(phases), start, quotas, used, num_blocks))
        start += int(quotas.sum()) * (num_blocks or 0)
        used = used + quotas * (num_blocks or 0)

    while True:
        is_active = ~ends | (used < sizes)
        if not is_active.any():
            return phases, start
        quotas = compute_quotas(weights * is_active, names)
        finite = ends & is_active
        if not finite.any():
            add(quotas, None)
            return phases, None
        if num_blocks := int(((sizes - used)[finite] // quotas[finite]).min()):
            add(quotas, num_blocks)
        left = np.where(finite, np.minimum(quotas, sizes - used), quotas)
        if (finite & (left > 0) & (left < quotas)).any():
            # In the block in which a source ends, it has only its remaining samples.
            add(left, 1)
