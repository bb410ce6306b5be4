"""The shapes of what a stage receives, sends and returns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshtrain.config.mesh import TP
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.head.size import loss_dtype
from meshtrain.parallel.tensor.collectives import shard_width
from meshtrain.parallel.tensor.region import sequence_is_split
from meshtrain.runtime.mesh import axis_size

if TYPE_CHECKING:
    from meshtrain.parallel.pipeline import Pipeline


def received_like(pipeline: "Pipeline", stage: Stage, batch: int, length: int) -> list[Tensor]:
    """Return meta tensors of the shapes that a stage receives, of which tp may split the sequence.

    Args:
        pipeline: of the stage.
        stage: not the first one.
        batch: number of sequences of a microbatch.
        length: of its sequences, in tokens.
    """
    return _split_over_tp(pipeline, stage.received_like(batch, length), stage.received_follow_sequence())


def sent_like(pipeline: "Pipeline", stage: Stage, batch: int, length: int) -> list[Tensor]:
    """Return meta tensors of the shapes that a stage sends; the arguments are as above."""
    return _split_over_tp(pipeline, stage.sent_like(batch, length), stage.sent_follow_sequence())


def _split_over_tp(pipeline: "Pipeline", tensors: Sequence[Tensor], follow: Sequence[bool]) -> list[Tensor]:
    if not (pipeline.plan.tensor.sequence_parallel and sequence_is_split()):
        return list(tensors)
    tp = axis_size(pipeline.mesh, TP)
    return [_split_shape(tensor, tp) if is_split else tensor for tensor, is_split in zip(tensors, follow, strict=True)]


def _split_shape(tensor: Tensor, tp: int) -> Tensor:
    batch, length, *rest = tensor.shape
    return tensor.new_empty((batch, length // tp, *rest), requires_grad=tensor.requires_grad)


def result_like(pipeline: "Pipeline", labels: Tensor) -> Tensor:
    """Return on meta what the last stage returns for one microbatch: its logits or its loss."""
    if pipeline.head is not None:
        return torch.empty((), dtype=loss_dtype(pipeline.plan), device="meta")
    config, group = pipeline.stages[0].model.config.get_text_config(), pipeline.mesh.get_group(TP)
    width = config.vocab_size
    if pipeline.logits_are_sharded:
        shard = shard_width(config.vocab_size, group)
        width = max(0, min(shard, config.vocab_size - shard * group.rank()))
    dtype = getattr(torch, pipeline.plan.precision.activations)
    return torch.empty(pipeline.micro_batch_size, labels.shape[1], width, dtype=dtype, device="meta")
