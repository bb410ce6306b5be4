"""Steps with fewer samples at the start of a run."""

from collections.abc import Sequence

import numpy as np

from meshtrain.data.samples.order import Order


class RampedOrder:
    """Another order, of which each step takes several steps, and the first ones take fewer.

    The number of samples before a step is arithmetic, so that the step is still the whole state of
    the data. There are no epochs of whole steps.

    Args:
        order: whose steps have the largest number of samples that divides all batches.
        batches: samples in each of the first steps.
        global_batch_size: samples in each step after them.
    """

    steps_per_epoch = None

    def __init__(self, order: Order, batches: Sequence[int], global_batch_size: int) -> None:
        self.global_batch_size = global_batch_size
        self._order = order
        self._starts = np.cumsum([0, *batches], dtype=np.int64)

    @property
    def num_steps(self) -> int | None:
        """The number of full steps; None: there is no end."""
        if self._order.num_steps is None:
            return None
        num_samples = self._order.num_steps * self._order.global_batch_size
        in_ramp = len(self._starts) - 1
        if num_samples < self._starts[-1]:
            return int(np.searchsorted(self._starts, num_samples, "right")) - 1
        return in_ramp + (num_samples - int(self._starts[-1])) // self.global_batch_size

    def num_samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before `step`."""
        behind = max(0, step - (len(self._starts) - 1))
        return int(self._starts[step - behind]) + behind * self.global_batch_size

    def epoch(self, step: int) -> int:
        """Return the epoch of the first sample of `step` (from 0), from 0."""
        return self._order.epoch(self._unit(step))

    def sample_ids(self, step: int) -> np.ndarray:
        """Return the samples of `step` (from 0): (batch,) int64."""
        parts = range(self._unit(step), self._unit(step + 1))
        return np.concatenate([self._order.sample_ids(part) for part in parts])

    def samples_before(self, step: int) -> dict[str, int]:
        """Return source -> its number of samples in all steps before `step`."""
        return self._order.samples_before(self._unit(step))

    def count(self, sample_ids: np.ndarray) -> dict[str, int]:
        """Return source -> its number of samples among `sample_ids`."""
        return self._order.count(sample_ids)

    def _unit(self, step: int) -> int:
        return self.num_samples_before(step) // self._order.global_batch_size
