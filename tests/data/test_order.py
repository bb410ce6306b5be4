"""The order of the samples: a permutation that is the same for every process."""

import time
from itertools import pairwise

import numpy as np
import pytest

from meshtrain.data.samples.order import FILLER, GroupedOrder, SampleOrder


def epoch_of(order: SampleOrder, epoch: int = 0) -> np.ndarray:
    first = epoch * order.steps_per_epoch
    return np.concatenate([order.sample_ids(step) for step in range(first, first + order.steps_per_epoch)])


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 15, 16, 17, 100, 1023, 4096, 65_537])
def test_an_epoch_visits_every_sample_once(num_samples):
    order = SampleOrder(num_samples, global_batch_size=1 + num_samples // 15, seed=3, drop_last=False)

    for epoch in (0, 1, 5):
        ids = epoch_of(order, epoch)
        assert np.array_equal(np.sort(ids[ids != FILLER]), np.arange(num_samples))


def test_the_shuffle_leaves_no_trace_of_the_order_on_disk():
    ids = epoch_of(SampleOrder(1 << 16, global_batch_size=1 << 12, seed=1))

    assert ids.dtype == np.int64
    assert abs(np.corrcoef(np.arange(len(ids)), ids)[0, 1]) < 0.02
    assert np.mean(np.diff(ids) == 1) < 0.001


def test_each_epoch_and_each_seed_has_its_own_order():
    orders = [SampleOrder(1000, global_batch_size=10, seed=seed) for seed in (0, 1)]
    epochs = [tuple(epoch_of(order, epoch)) for order in orders for epoch in (0, 1)]

    assert len(set(epochs)) == 4


def test_the_order_never_changes_between_versions():
    """Checkpoints depend on it: a run resumed after an upgrade must not read a sample twice."""
    order = SampleOrder(1000, global_batch_size=6, seed=7)

    assert order.sample_ids(0).tolist() == GOLDEN[0]
    assert order.sample_ids(166).tolist() == GOLDEN[166]


GOLDEN = {0: [103, 379, 861, 416, 311, 313], 166: [559, 181, 745, 459, 186, 50]}


def test_without_shuffle_samples_come_as_stored():
    order = SampleOrder(10, global_batch_size=4, shuffle=False)

    assert [order.sample_ids(step).tolist() for step in (0, 1, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_incomplete_batch_is_dropped_or_completed():
    dropped = SampleOrder(10, global_batch_size=4, shuffle=False)
    filled = SampleOrder(10, global_batch_size=4, shuffle=False, drop_last=False)

    assert (dropped.steps_per_epoch, filled.steps_per_epoch) == (2, 3)
    assert filled.sample_ids(2).tolist() == [8, 9, FILLER, FILLER]
    assert filled.sample_ids(3).tolist() == [0, 1, 2, 3]


def test_a_full_last_batch_needs_no_filler():
    order = SampleOrder(8, global_batch_size=4, drop_last=False)

    assert order.steps_per_epoch == 2
    assert FILLER not in epoch_of(order)


def test_steps_count_from_zero_across_epochs():
    order = SampleOrder(100, global_batch_size=16)

    assert [order.epoch(step) for step in (0, 5, 6, 11, 12)] == [0, 0, 1, 1, 2]


def test_a_step_of_a_trillion_samples_takes_no_time():
    order = SampleOrder(10**12, global_batch_size=256, seed=1)

    def seconds(step: int) -> float:
        begin = time.perf_counter()
        ids = order.sample_ids(step)
        assert 0 <= ids.min() <= ids.max() < 10**12
        return time.perf_counter() - begin

    assert min(map(seconds, range(100))) < 1e-3


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_group_is_sorted_by_length_and_holds_the_same_samples(drop_last):
    lengths = np.random.default_rng(0).integers(1, 1000, 103)
    plain = SampleOrder(103, global_batch_size=4, seed=2, drop_last=drop_last)
    grouped = GroupedOrder(plain, lambda ids: np.where(ids < 0, 1, lengths[ids]), group=10, seed=2)
    per_epoch = plain.steps_per_epoch
    spans = []
    for first in [*range(0, per_epoch, 10), *range(per_epoch, 2 * per_epoch, 10)]:
        group = range(first, min(first + 10, per_epoch * (1 + first // per_epoch)))
        batches = [grouped.sample_ids(step) for step in group]
        assert sorted(np.concatenate(batches)) == sorted(np.concatenate([plain.sample_ids(step) for step in group]))
        whole = [lengths[batch] for batch in batches if (batch >= 0).all()]
        spans += [batch.max() - batch.min() for batch in whole]
        # The lengths of batches do not overlap, in whatever order they come.
        ranges = sorted((batch.min(), batch.max()) for batch in whole)
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    assert np.mean(spans) < 200
    firsts = [lengths[grouped.sample_ids(step)].max() for step in range(10)]
    assert firsts != sorted(firsts)
    assert [grouped.epoch(step) for step in (0, per_epoch)] == [0, 1]
