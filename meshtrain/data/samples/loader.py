"""The loader: batches of torch tensors, read in the background while the step before is computed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchdata.nodes import IterableWrapper, Loader, Mapper, Prefetcher

from meshtrain.data.samples.order import Order, find_data_step
from meshtrain.data.samples.rows import Samples
from meshtrain.errors import UserError

PREFETCHED_BATCHES = 4


@dataclass(frozen=True)
class Batch:
    """What one data-parallel rank reads for one step."""

    step: int
    """The optimizer step, from 0."""
    data_step: int
    """The place in the data, in batches from 0: the step, and those that were left out before it."""
    epoch: int
    """The epoch of that place, from 0."""
    sample_ids: np.ndarray
    """(global_batch,) int64: the samples of the whole step, on every rank, for those who ask what was trained on."""
    tensors: dict[str, Tensor]
    """This rank's rows, (global_batch/dp, seq) int64 each: input_ids, labels, and as the form of the data has it
    attention_mask or position_ids."""
    source_samples: dict[str, int]
    """Source -> its samples up to this batch, over all processes; empty where there is one source only."""


def build_loader(
    samples: Samples,
    order: Order,
    *,
    dp_rank: int,
    dp_size: int,
    start_step: int,
    stop_step: int,
    left_out: Sequence[int] = (),
    with_tokens: bool = True,
    pin_memory: bool = False,
) -> Iterable[Batch]:
    """Build the batches of the steps start_step <= step < stop_step for one data-parallel rank.

    Each iteration starts a thread that reads up to PREFETCHED_BATCHES ahead; what it raises is raised here, with its
    type, a UserError as it is. The thread ends with the iterator. Iterating again starts over at `start_step`.

    Args:
        dp_rank: this rank's place over all data-parallel axes; it takes the rows
            dp_rank * local_batch <= row < (dp_rank + 1) * local_batch of the global batch.
        dp_size: must divide the global batch.
        left_out: places in the data whose batches no step gets, ascending.
        with_tokens: whether this process looks at tokens; otherwise `input_ids` are 0, and `labels` just tell what is
            trained on.
        pin_memory: put the tensors into page-locked memory; the process must have chosen its GPU before.
    """
    local_batch, rest = divmod(order.global_batch_size, dp_size)
    assert rest == 0, f"a global batch of {order.global_batch_size} does not divide over {dp_size} ranks"
    rows = slice(dp_rank * local_batch, (dp_rank + 1) * local_batch)

    def read(step: int) -> Batch | UserError:
        try:
            return read_batch(step)
        except UserError as error:
            # As a value: what is raised in the thread comes out as another exception, with a traceback for its words.
            return error

    def read_batch(step: int) -> Batch:
        data_step = find_data_step(step, left_out)
        sample_ids = order.sample_ids(data_step)
        arrays = samples.read(sample_ids[rows], samples.width(sample_ids), with_tokens=with_tokens)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if pin_memory:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        counts = order.samples_before(data_step + 1)
        for place in left_out:
            if place < data_step:
                passed = order.count(order.sample_ids(place))
                counts = {source: count - passed[source] for source, count in counts.items()}
        return Batch(step, data_step, order.epoch(data_step), sample_ids, tensors, counts)

    # One thread: it copies gigabytes a second. ParallelMapper and PinMemory are not used, because their threads call
    # torch.set_num_threads(1), which silently takes the cores away from the CPU operators of the whole process.
    steps = IterableWrapper(range(start_step, stop_step))
    return _Batches(Loader(Prefetcher(Mapper(steps, read), prefetch_factor=PREFETCHED_BATCHES)))


@dataclass(frozen=True)
class _Batches:
    """What was read, and what was wrong with it raised where it is waited for."""

    read: Iterable[Batch | UserError]

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.read:
            if isinstance(batch, UserError):
                raise batch
            yield batch
