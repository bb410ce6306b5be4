"""Mixtures: every source has its share, and the step alone decides every sample."""

import time

import numpy as np
import pytest

from meshtrain.data.samples.mixture import (
    MAX_BLOCK_SAMPLES,
    MIN_BLOCK_SAMPLES,
    MixedSource,
    MixtureOrder,
    compute_quotas,
)
from meshtrain.data.samples.order import GroupedOrder
from meshtrain.errors import DataError

SOURCES = (MixedSource("code", 700, 3.0), MixedSource("web", 50, 1.0), MixedSource("books", 90, 0.5))
OFFSETS = np.array([0, 700, 750, 840])


def ids_of(order: MixtureOrder, steps: range) -> np.ndarray:
    return np.concatenate([order.sample_ids(step) for step in steps])


def sources_of(ids: np.ndarray) -> np.ndarray:
    return np.searchsorted(OFFSETS[1:], ids, "right")


@pytest.mark.parametrize(
    ("weights", "quotas"),
    [
        ((1.0, 1.0), (32, 32)),
        ((3.0, 1.0), (48, 16)),
        ((0.7, 0.2, 0.1), (49, 14, 7)),
        ((1 / 3, 2 / 3, 0.0), (22, 44, 0)),
        ((0.12345678, 0.87654322), (1235, 8765)),
    ],
)
def test_block_has_exact_shares(weights, quotas):
    found = compute_quotas(np.array(weights), ["a", "b", "c"])

    assert tuple(found) == quotas
    assert MIN_BLOCK_SAMPLES <= found.sum() <= MAX_BLOCK_SAMPLES


def test_too_small_a_share_is_refused():
    with pytest.raises(DataError) as caught:
        MixtureOrder([MixedSource("a", 10, 1.0), MixedSource("b", 10, 1e-5)], global_batch_size=4)

    assert caught.value.lines == (
        "data.sources.b.weight is 1.0e-05 of all weights, and a mixture supports shares of 1 in 10,000 or more; "
        "raise it, or leave the source out",
    )


def test_shares_hold_from_the_first_blocks_on():
    order = MixtureOrder(SOURCES, global_batch_size=8, seed=5)
    block = 9 * 8

    counts = np.bincount(sources_of(ids_of(order, range(block // 8))), minlength=3)

    assert counts.tolist() == [48, 16, 8]


def test_each_source_visits_every_sample_once_in_an_epoch_of_its_own():
    order = MixtureOrder(SOURCES, global_batch_size=9, seed=5)
    ids = ids_of(order, range(400))
    for number, source in enumerate(SOURCES):
        own = ids[sources_of(ids) == number] - OFFSETS[number]
        epochs = [own[first : first + source.num_samples] for first in range(0, len(own), source.num_samples)]
        for epoch in epochs[:-1]:
            assert np.array_equal(np.sort(epoch), np.arange(source.num_samples))
        assert len(epochs) < 3 or not np.array_equal(epochs[0], epochs[1])


def test_another_seed_gives_another_mixture():
    first, second = (MixtureOrder(SOURCES, global_batch_size=64, seed=seed).sample_ids(3) for seed in (0, 1))

    assert not np.array_equal(sources_of(first), sources_of(second))


def test_counts_are_those_of_the_samples():
    order = MixtureOrder(SOURCES, global_batch_size=7, seed=2)
    ids = ids_of(order, range(300))
    for step in (0, 1, 17, 50, 299):
        counts = np.bincount(sources_of(ids[: step * 7]), minlength=3)
        assert order.samples_before(step) == dict(zip(("code", "web", "books"), counts.tolist(), strict=True))
    assert order.count(ids[:70]) == order.samples_before(10)


@pytest.mark.parametrize("ending", [("web",), ("web", "books"), ("code", "web", "books")])
def test_other_sources_continue_when_one_ends(ending):
    sources = [MixedSource(s.name, s.num_samples, s.weight, repeats=s.name not in ending) for s in SOURCES]
    order = MixtureOrder(sources, global_batch_size=6, seed=1)
    steps = order.num_steps if order.num_steps is not None else 400

    ids = ids_of(order, range(steps))

    for number, source in enumerate(sources):
        own = ids[sources_of(ids) == number]
        if source.name in ending:
            assert len(own) == len(set(own.tolist()))
            # Samples that do not fill the last batch are left out.
            assert len(own) > source.num_samples - 6
    if order.num_steps is not None:
        assert steps == sum(source.num_samples for source in sources) // 6
    else:
        # After those end, the remaining sources keep their relative shares.
        late = np.bincount(sources_of(ids[-1200:]), minlength=3)
        going_on = [source.weight for source in sources if source.name not in ending]
        assert [count for count in late if count] == pytest.approx(
            [1200 * weight / sum(going_on) for weight in going_on], abs=40
        )
    for step in (0, 20, 45, steps - 1):
        assert sum(order.samples_before(step).values()) == 6 * step
        assert order.samples_before(step + 1) == order.count(ids[: 6 * (step + 1)])


def test_source_smaller_than_its_quota_ends_within_a_block():
    order = MixtureOrder([MixedSource("a", 3, repeats=False), MixedSource("b", 2, repeats=False)], global_batch_size=5)

    assert order.num_steps == 1
    assert sorted(order.sample_ids(0)) == [0, 1, 2, 3, 4]


def test_a_group_of_a_mixture_holds_the_same_samples():
    mixture = MixtureOrder(SOURCES, global_batch_size=8, seed=3)
    lengths = np.random.default_rng(0).integers(1, 100, 840)
    grouped = GroupedOrder(mixture, lambda ids: lengths[ids], group=5, seed=3)

    for first in (0, 5, 95):
        group = range(first, first + 5)
        assert sorted(ids_of(grouped, group)) == sorted(ids_of(mixture, group))
    assert grouped.samples_before(7) == mixture.count(ids_of(grouped, range(7)))


def test_a_mixture_of_a_trillion_samples_is_found_as_fast_as_one_of_a_thousand():
    sources = [MixedSource(name, 10**12, weight) for name, weight in (("a", 0.6), ("b", 0.4))]
    order = MixtureOrder(sources, global_batch_size=512)
    order.sample_ids(10**9)
    begin = time.perf_counter()
    ids = order.sample_ids(10**9 + 1)

    assert time.perf_counter() - begin < 0.05
    assert len(np.unique(ids)) == 512
