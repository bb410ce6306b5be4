"""Batches as a user's program gives them: each data-parallel rank its own part, in Hugging Face's words."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from meshtrain.errors import DataError
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.digest import tensor_digest
from meshtrain.runtime.mesh import MODEL_AXES, all_reduce_over, axis_size


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
