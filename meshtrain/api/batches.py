"""Batches of a program: each data-parallel rank passes its own part, under Hugging Face names."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from transformers import PretrainedConfig

from meshtrain.config.mesh import MODEL_AXES
from meshtrain.errors import DataError, Problem
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.digest import tensor_digest
from meshtrain.runtime.mesh import all_reduce_over, axis_size


def check_same_batch(pipeline: Pipeline, batch: Mapping[str, Any]) -> None:
    """Check that the ranks that share a model got the same inputs. Collective over tp, cp and pp.

    Without the check, a program that shuffles on every rank separately would silently train on
    nonsense.

    Raises:
        DataError: on all of these ranks alike.
    """
    if axis_size(pipeline.mesh, *MODEL_AXES) == 1:
        return
    is_same, _ = compare_batches(pipeline, batch)
    if not is_same:
        raise DataError(different_batch(batch))


def compare_batches(pipeline: Pipeline, batch: Mapping[str, Any], *further: int) -> tuple[bool, list[int]]:
    """Compare the inputs of ranks that share a model, in one message.

    Collective over tp, cp and pp.

    Args:
        further: other numbers of this rank.

    Returns:
        Whether all ranks have the same tensors, and the maximum of each of the further numbers.
    """
    digests = [(name, tensor_digest(value)) for name, value in _tensors(batch)]
    digest = xxhash.xxh3_64_intdigest(str(digests).encode()) >> 2
    # One message carries the maximum and, negated, the minimum.
    numbers = all_reduce_over(
        torch.tensor([digest, -digest, *further]), pipeline.mesh, MODEL_AXES, dist.ReduceOp.MAX
    ).tolist()
    return numbers[0] == -numbers[1], numbers[2:]


def mask_without_cache(config: PretrainedConfig, given: Mapping[str, Any]) -> Tensor | None:
    """Return the attention mask with which a call without a cache computes what it would with one.

    transformers separates documents whose `position_ids` start from 0 again only if there is
    neither a mask nor a cache. A stock call makes a cache unless `use_cache` is False. Stages of a
    pipeline and recomputed layers have no cache.

    Args:
        config: of the model.
        given: arguments of the call, by name.

    Returns:
        Ones (rows, seq), or None if the call needs no mask.
    """
    requested = given.get("use_cache")
    makes_cache = getattr(config.get_text_config(), "use_cache", False) if requested is None else requested
    others = (given.get(name) for name in ("attention_mask", "past_key_values"))
    if not makes_cache or given.get("position_ids") is None or any(other is not None for other in others):
        return None
    tokens = given.get("input_ids")
    rows = given["inputs_embeds"][..., 0] if tokens is None else tokens
    return torch.ones_like(rows, dtype=torch.int64)


def different_batch(batch: Mapping[str, Any]) -> Problem:
    """Return the problem of a rank whose batch differs from the others of its model."""
    shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in _tensors(batch))
    return Problem(
        f"rank {dist.get_rank()} received a different batch from a rank that shares its model over tp, cp or pp (here: "
        f"{shapes})",
        "pass the same rows in the same order to all of these ranks: call torch.manual_seed(0) before the DataLoader "
        "shuffles, or use a sampler over the data ranks only",
    )


def _tensors(batch: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return sorted((name, value) for name, value in batch.items() if isinstance(value, Tensor) and value.numel())
