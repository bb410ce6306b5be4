"""Batches as a user's program gives them: each data-parallel rank its own part, in Hugging Face's words."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.data.samples import IGNORE_INDEX
from meshtrain.errors import DataError
from meshtrain.parallel.collectives import reduce_from_shards
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.digest import tensor_digest
from meshtrain.runtime.mesh import DATA_AXES, MODEL_AXES, all_reduce_over, axis_size


def check_same_batch(pipeline: Pipeline, batch: Mapping[str, Any]) -> None:
    """Check that the ranks which share a model were given the same inputs. Collective over tp and pp.

    A program that shuffles on every rank for itself would train on nonsense, without a word.

    Raises:
        DataError: on all of these ranks alike.
    """
    mesh = pipeline.mesh
    if axis_size(mesh, *MODEL_AXES) == 1:
        return
    digests = [(name, tensor_digest(value)) for name, value in _tensors(batch)]
    digest = xxhash.xxh3_64_intdigest(str(digests).encode()) >> 2
    # The largest and the smallest in one message.
    extremes = all_reduce_over(torch.tensor([digest, -digest]), mesh, MODEL_AXES, dist.ReduceOp.MAX)
    if int(extremes[0]) != -int(extremes[1]):
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in _tensors(batch))
        raise DataError(
            f"rank {dist.get_rank()} was given another batch than a rank that shares its model over tp or pp (here: "
            f"{shapes}); give all of these the same rows in the same order: torch.manual_seed(0) before the DataLoader "
            "shuffles, or a sampler over the data ranks only"
        )


def _tensors(batch: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return sorted((name, value) for name, value in batch.items() if isinstance(value, Tensor) and value.numel())


def count_labels(labels: Tensor, *, shifts: bool) -> Tensor:
    """Return over how many labels a stock loss takes its mean, () float64.

    Args:
        shifts: whether the loss leaves out the first of each row, as that of a causal LM does.
    """
    if labels.is_floating_point():
        return torch.tensor(float(labels.numel()), dtype=torch.float64, device=labels.device)
    counted = labels[..., 1:] if shifts else labels
    return (counted != IGNORE_INDEX).sum().double()


def mean_over_data_ranks(loss: Tensor, logits: Tensor, counted: Tensor | None, mesh: DeviceMesh) -> Tensor:
    """Return the loss of the batches of all data ranks, from that of this rank's.

    Its value is the same on all ranks, and their gradients add up to that of one process with the whole batch.

    Args:
        loss: () mean over this rank's labels.
        logits: that it was computed from.
        counted: () number of these labels; None if the loss is a share of the sum already (`num_items_in_batch`).
    """
    axes = [axis for axis in DATA_AXES if axis_size(mesh, axis) > 1]
    if not axes:
        return loss
    if counted is not None:
        total = all_reduce_over(counted.clone(), mesh, axes)
        # The mean over no label is not a number, and would spread.
        share = loss * (counted / total.clamp(min=1)).to(loss.dtype) if bool(counted) else (logits * 0.0).sum()
        loss = share.to(loss.dtype)
    for axis in axes:
        loss = reduce_from_shards(loss, mesh.get_group(axis))
    return loss
