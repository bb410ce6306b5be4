"""Smaller batches at the start of a run: their samples follow each other without a gap."""

import numpy as np
import pytest

from meshtrain.config.batch_ramp import BatchRampConfig
from meshtrain.data.samples.loader import build_loader
from meshtrain.data.samples.mixture import MixedSource, MixtureOrder
from meshtrain.data.samples.order import Order, SampleOrder
from meshtrain.data.samples.ramp import RampedOrder
from meshtrain.data.samples.rows import Samples

RAMP = BatchRampConfig(first=2, increment=4, steps=5)
LARGEST = 10
# The sizes 2 and 6, in turn for three steps and for two, and then the full batch.
SIZES = [2, 2, 2, 6, 6, 10, 10]


def ramped(order: Order) -> RampedOrder:
    return RampedOrder(order, RAMP.batches(LARGEST), LARGEST)


def of_one_source() -> SampleOrder:
    return SampleOrder(30, global_batch_size=RAMP.unit(LARGEST), seed=3)


def of_two_sources(repeats: bool = True) -> MixtureOrder:
    sources = [MixedSource("a", 40, repeats=repeats), MixedSource("b", 25, weight=0.5, repeats=repeats)]
    return MixtureOrder(sources, global_batch_size=RAMP.unit(LARGEST), seed=3)


@pytest.mark.parametrize("base", [of_one_source, of_two_sources])
def test_samples_of_all_steps_are_those_of_the_other_order(base) -> None:
    order = ramped(base())
    found = [order.sample_ids(step) for step in range(len(SIZES))]
    assert [len(ids) for ids in found] == SIZES
    units = sum(SIZES) // RAMP.unit(LARGEST)
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate([base().sample_ids(it) for it in range(units)]))
    assert [order.num_samples_before(step) for step in range(len(SIZES))] == [0, *np.cumsum(SIZES)[:-1]]


def test_sources_are_counted() -> None:
    order = ramped(of_two_sources())
    for step in range(len(SIZES)):
        before = np.concatenate([np.empty(0, np.int64), *map(order.sample_ids, range(step))])
        assert order.samples_before(step) == order.count(before)


@pytest.mark.parametrize("num_samples", [1, 11, 17, 18, 27, 28, 47, 48])
def test_number_of_full_steps_is_known(num_samples: int) -> None:
    source = MixedSource("a", num_samples, repeats=False)
    order = ramped(MixtureOrder([source], global_batch_size=RAMP.unit(LARGEST), seed=3))
    wanted = np.searchsorted(np.cumsum([*SIZES, 10, 10]), num_samples - num_samples % 2, "right")
    assert order.num_steps == wanted


def test_steps_without_end_have_no_number() -> None:
    assert ramped(of_one_source()).num_steps is None


class Zeros(Samples):
    def read(self, sample_ids, width=None, *, with_tokens=True):
        return {"labels": np.repeat(sample_ids[:, None], 2, 1)}

    def width(self, sample_ids):
        return 2


def test_each_rank_reads_its_part_of_each_batch_and_samples_are_counted() -> None:
    order = ramped(of_one_source())
    loaders = [
        build_loader(Zeros(), order, dp_rank=rank, dp_size=2, start_step=1, stop_step=5, left_out=(2,))
        for rank in (0, 1)
    ]
    total = 2
    for step, batches in enumerate(zip(*loaders, strict=True), start=1):
        data_step = step if step < 2 else step + 1
        rows = np.concatenate([batch.tensors["labels"][:, 0] for batch in batches])
        np.testing.assert_array_equal(rows, order.sample_ids(data_step))
        total += SIZES[data_step]
        assert [batch.num_samples for batch in batches] == [total, total]
