"""The loader: it reads the right rows ahead, from any step and for any number of ranks."""

import gc
import threading
import time

import numpy as np
import pytest
import torch

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.data.samples.loader import PREFETCHED_BATCHES, Batch, build_loader
from meshtrain.data.samples.mixture import MixedSource, MixtureOrder
from meshtrain.data.samples.order import FILLER, SampleOrder, find_data_step
from meshtrain.data.samples.rows import PackedSamples, PaddedSamples, Samples
from meshtrain.errors import DataError
from tests.data.corpora import token_file

TEXTS = [f"document number {number}, and then some" * (number % 3 + 1) for number in range(60)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Samples:
    tokens, tokenizer = token_file(tmp_path_factory.mktemp("packed"), TEXTS)
    return PackedSamples(tokens, 16, pad_id=tokenizer.pad_id)


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> Samples:
    tokens, tokenizer = token_file(tmp_path_factory.mktemp("padded"), TEXTS)
    return PaddedSamples(tokens, 50, pad_id=tokenizer.pad_id)


def load(samples: Samples, order: SampleOrder, start: int, stop: int, rank: int = 0, size: int = 1) -> list[Batch]:
    return list(build_loader(samples, order, dp_rank=rank, dp_size=size, start_step=start, stop_step=stop))


def same(one: Batch, other: Batch) -> bool:
    return (
        (one.step, one.epoch) == (other.step, other.epoch)
        and np.array_equal(one.sample_ids, other.sample_ids)
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    )


def test_batches_hold_what_the_order_says(packed, padded):
    for samples, names in ((packed, {"input_ids", "labels"}), (padded, {"input_ids", "labels", "attention_mask"})):
        order = SampleOrder(len(samples), global_batch_size=8, seed=1)

        batches = load(samples, order, 0, 9)

        assert [batch.step for batch in batches] == list(range(9))
        assert [batch.epoch for batch in batches] == [order.epoch(step) for step in range(9)]
        for batch in batches:
            assert batch.tensors.keys() == names
            assert np.array_equal(batch.sample_ids, order.sample_ids(batch.step))
            for name, array in samples.read(batch.sample_ids).items():
                assert batch.tensors[name].dtype == torch.int64
                assert batch.tensors[name].is_contiguous()
                assert np.array_equal(batch.tensors[name].numpy(), array)


def test_starting_at_a_later_step_continues_the_sequence(packed):
    order = SampleOrder(len(packed), global_batch_size=8, seed=1)
    whole = load(packed, order, 0, 2 * order.steps_per_epoch + 3)

    for start in (1, order.steps_per_epoch - 1, order.steps_per_epoch, order.steps_per_epoch + 5):
        tail = load(packed, order, start, len(whole))
        assert len(tail) == len(whole) - start
        assert all(map(same, tail, whole[start:]))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_all_ranks_together_read_the_same_global_batch(padded, dp_size):
    order = SampleOrder(len(padded), global_batch_size=8, seed=2, drop_last=False)
    whole = load(padded, order, 0, 10)

    ranks = [load(padded, order, 0, 10, rank, dp_size) for rank in range(dp_size)]

    for step, batch in enumerate(whole):
        shares = [rank[step] for rank in ranks]
        assert all(np.array_equal(share.sample_ids, batch.sample_ids) for share in shares)
        for name, tensor in batch.tensors.items():
            assert torch.equal(torch.cat([share.tensors[name] for share in shares]), tensor)


def test_last_batch_is_completed_with_rows_that_are_not_trained_on(padded):
    order = SampleOrder(len(padded), global_batch_size=8, shuffle=False, drop_last=False)

    last = load(padded, order, 7, 8)[0]

    assert last.sample_ids.tolist() == [56, 57, 58, 59, *[FILLER] * 4]
    assert (last.tensors["labels"][4:] == IGNORE_INDEX).all()
    assert (last.tensors["labels"][:4] != IGNORE_INDEX).any(dim=1).all()


def test_no_steps_give_no_batches(packed):
    assert load(packed, SampleOrder(len(packed), global_batch_size=8), 5, 5) == []


def test_iterating_again_starts_over(packed):
    order = SampleOrder(len(packed), global_batch_size=8)
    loader = build_loader(packed, order, dp_rank=0, dp_size=1, start_step=3, stop_step=6)

    for _ in range(2):
        assert [batch.step for batch in loader] == [3, 4, 5]


def test_batches_left_out_are_skipped(packed):
    order = SampleOrder(len(packed), global_batch_size=8)
    places = [find_data_step(step, (1, 2, 5)) for step in range(5)]
    assert places == [0, 3, 4, 6, 7]

    batches = list(build_loader(packed, order, dp_rank=0, dp_size=2, start_step=1, stop_step=5, left_out=(1, 2, 5)))

    assert [batch.step for batch in batches] == [1, 2, 3, 4]
    assert [batch.data_step for batch in batches] == places[1:]
    assert [batch.epoch for batch in batches] == [order.epoch(place) for place in places[1:]]
    assert all(np.array_equal(batch.sample_ids, order.sample_ids(batch.data_step)) for batch in batches)


class SlowSamples:
    """Samples from a slow disk."""

    def __init__(self, seconds: float = 0.0, broken_at: int | None = None) -> None:
        self.seconds, self.broken_at = seconds, broken_at
        self.num_reads = 0

    def __len__(self) -> int:
        return 1000

    def lengths(self, sample_ids: np.ndarray) -> np.ndarray:
        return np.ones_like(sample_ids)

    def width(self, sample_ids: np.ndarray) -> int:
        return 1

    def read(
        self, sample_ids: np.ndarray, width: int | None = None, *, with_tokens: bool = True
    ) -> dict[str, np.ndarray]:
        time.sleep(self.seconds)
        self.num_reads += 1
        if self.num_reads == self.broken_at:
            raise DataError("the disk is gone")
        return {"input_ids": sample_ids[:, None]}


def test_error_in_the_thread_is_raised_by_the_loader():
    batches = iter(
        build_loader(
            SlowSamples(broken_at=3),
            SampleOrder(1000, global_batch_size=4),
            dp_rank=0,
            dp_size=1,
            start_step=0,
            stop_step=50,
        )
    )

    assert [next(batches).step, next(batches).step] == [0, 1]
    with pytest.raises(DataError, match="the disk is gone"):
        next(batches)


def test_reading_ahead_hides_a_slow_disk():
    order = SampleOrder(1000, global_batch_size=4)
    batches = iter(build_loader(SlowSamples(0.01), order, dp_rank=0, dp_size=1, start_step=0, stop_step=30))
    next(batches)
    waits = []
    for _ in range(20):
        time.sleep(0.03)
        begin = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - begin)

    assert np.median(waits) < 0.003


def test_reading_ahead_is_limited():
    samples = SlowSamples()
    order = SampleOrder(1000, global_batch_size=4)
    batches = iter(build_loader(samples, order, dp_rank=0, dp_size=1, start_step=0, stop_step=200))
    next(batches)
    time.sleep(0.2)

    assert samples.num_reads <= 1 + PREFETCHED_BATCHES


def test_the_thread_ends_with_the_loader():
    before = set(threading.enumerate())
    order = SampleOrder(1000, global_batch_size=4)
    loader = build_loader(SlowSamples(), order, dp_rank=0, dp_size=1, start_step=0, stop_step=200)
    batches = iter(loader)
    next(batches)
    (thread,) = set(threading.enumerate()) - before

    del loader, batches
    gc.collect()
    thread.join(10)

    assert not thread.is_alive()


def test_loading_leaves_the_cores_to_the_model(packed):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        load(packed, SampleOrder(len(packed), global_batch_size=8), 0, 5)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory belongs to a GPU")
def test_batches_are_pinned(packed):
    order = SampleOrder(len(packed), global_batch_size=8)
    loader = build_loader(packed, order, dp_rank=0, dp_size=1, start_step=0, stop_step=3, pin_memory=True)

    assert all(tensor.is_pinned() for batch in loader for tensor in batch.tensors.values())


def test_batches_left_out_are_not_counted(packed):
    sources = [MixedSource("a", len(packed) // 2, 3.0), MixedSource("b", len(packed) // 2)]
    order = MixtureOrder(sources, global_batch_size=8)
    batches = build_loader(packed, order, dp_rank=0, dp_size=1, start_step=0, stop_step=9, left_out=(1, 2, 5))
    seen = {"a": 0, "b": 0}
    for batch in batches:
        seen = {name: seen[name] + count for name, count in order.count(batch.sample_ids).items()}
        assert batch.source_samples == seen
