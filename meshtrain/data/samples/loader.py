"""The loader: batches of torch tensors, which a thread reads while the step before is computed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchdata.nodes import IterableWrapper, Loader, Mapper, Prefetcher

from meshtrain.data.samples.order import Order, find_data_step
from meshtrain.data.samples.rows import Samples, in_rows
from meshtrain.errors import UserError

PREFETCHED_BATCHES = 4


@dataclass(frozen=True)
class Batch:
    """The data of one data-parallel rank for one step."""

    step: int
    """The optimizer step, from 0."""
    data_step: int
    """The index of the batch in the data, from 0. It counts the batches that no step reads too."""
    epoch: int
    """The epoch of that batch, from 0."""
    sample_ids: np.ndarray
    """(batch,) int64: the samples of the whole step, the same on every rank, for logs."""
    tensors: dict[str, Tensor]
    """The rows of this rank, (batch/dp, seq) int64 each.

    They are `input_ids` and `labels`, and `attention_mask` or `position_ids` if the form of the
    data has them. The rows of a pair follow each other. Judged answers have further tensors, see
    meshtrain.data.samples.answers.
    """
    num_samples: int
    """The number of samples so far, over all processes."""
    source_samples: dict[str, int]
    """Source -> its number of samples so far, over all processes; empty for a single source."""


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

    Each iteration starts a thread that reads up to PREFETCHED_BATCHES ahead, and ends with the
    iterator. A UserError of the thread is raised here unchanged. A second iteration starts again at
    `start_step`.

    Args:
        dp_rank: the coordinate of this rank over all data-parallel axes; it reads the rows
            dp_rank * local_batch <= row < (dp_rank + 1) * local_batch of the global batch.
        dp_size: must divide every global batch.
        left_out: indices of batches that no step reads, ascending.
        with_tokens: whether this process needs tokens. If not, `input_ids` are 0, and `labels` only
            mark which positions are trained on.
        pin_memory: put the tensors into page-locked memory. The process must have selected its GPU
            before.
    """

    def read(step: int) -> Batch | UserError:
        try:
            return read_batch(step)
        except UserError as error:
            # It is returned, because torchdata would raise another exception with a traceback as
            # its message.
            return error

    def read_batch(step: int) -> Batch:
        data_step = find_data_step(step, left_out)
        sample_ids = order.sample_ids(data_step)
        local_batch, rest = divmod(len(sample_ids), dp_size)
        assert rest == 0, f"a global batch of {len(sample_ids)} does not divide over {dp_size} ranks"
        rows = slice(dp_rank * local_batch, (dp_rank + 1) * local_batch)
        arrays = in_rows(samples.read(sample_ids[rows], samples.width(sample_ids), with_tokens=with_tokens))
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if pin_memory:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        counts, number = order.samples_before(data_step + 1), order.num_samples_before(data_step + 1)
        for skipped in left_out:
            if skipped < data_step:
                ids = order.sample_ids(skipped)
                passed, number = order.count(ids), number - len(ids)
                counts = {source: count - passed[source] for source, count in counts.items()}
        return Batch(step, data_step, order.epoch(data_step), sample_ids, tensors, number, counts)

    # One thread is enough: it copies gigabytes a second. ParallelMapper and PinMemory are not used,
    # because their threads call torch.set_num_threads(1), which leaves one core for the CPU
    # operators of the process.
    steps = IterableWrapper(range(start_step, stop_step))
    return _Batches(Loader(Prefetcher(Mapper(steps, read), prefetch_factor=PREFETCHED_BATCHES)))


@dataclass(frozen=True)
class _Batches:
    """Yields the batches of a reader, and raises the errors that it returns."""

    read: Iterable[Batch | UserError]

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.read:
            if isinstance(batch, UserError):
                raise batch
            yield batch
