"""The loss: next-token cross-entropy, summed over trained tokens and divided once by their global count."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshtrain.data.samples import IGNORE_INDEX
from meshtrain.parallel.collectives import max_over_shards, shard_width, sum_over_shards


class TokenLoss:
    """Callable on the logits and labels of a microbatch; holds the denominator and the scale of the current step.

    Args:
        vocabulary: size of the whole vocabulary.
        group: the tp group, if the logits are sharded over it; else None.
    """

    def __init__(self, vocabulary: int, group: ProcessGroup | None) -> None:
        self.vocabulary, self.group = vocabulary, group
        self.num_tokens = torch.ones(())
        self.scale = 1.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a microbatch's tokens divided by the number of trained tokens in the global batch.

        It is multiplied by `scale`, the loss scale of float16.

        Args:
            logits: (batch, seq, vocab) or this process's (batch, seq, vocab/tp).
            labels: (batch, seq), int64, already shifted; IGNORE_INDEX marks tokens that do not count.
        """
        logits, labels = logits.flatten(0, 1), labels.flatten()
        # The sum over many tokens loses bfloat16's few digits; float64 stays, for proofs.
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        if self.group is None:
            total = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        else:
            total = _ShardedCrossEntropy.apply(logits, labels, self.vocabulary, self.group)  # type: ignore[no-untyped-call]
        return total * self.scale / self.num_tokens


def count_trained_tokens(labels: Tensor) -> Tensor:
    """Return the () int64 number of labels that count."""
    return (labels != IGNORE_INDEX).sum()


class _ShardedCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropy over logits that are sharded over the vocabulary; two small reductions per call.

    Source: Megatron-LM (arXiv:1909.08053), section 3.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits: Tensor, labels: Tensor, vocabulary: int, group: ProcessGroup
    ) -> Tensor:
        first = group.rank() * shard_width(vocabulary, group)
        counted = labels != IGNORE_INDEX
        columns = labels - first
        here = counted & (columns >= 0) & (columns < logits.shape[-1])
        columns = columns.masked_fill(~here, 0)
        largest = max_over_shards(logits.amax(-1), group)
        shifted = logits - largest.unsqueeze(-1)
        target = shifted.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        weights = shifted.exp_()
        # One reduction for both sums.
        normaliser, target = sum_over_shards(torch.stack([weights.sum(-1), target]), group)
        weights /= normaliser.unsqueeze(-1)
        ctx.save_for_backward(weights, columns, here, counted)
        return (normaliser.log() - target).masked_fill(~counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        weights, columns, here, counted = ctx.saved_tensors  # type: ignore[attr-defined]
        weights.scatter_add_(-1, columns.unsqueeze(-1), -here.to(weights.dtype).unsqueeze(-1))
        weights *= (counted * gradient).unsqueeze(-1)
        return weights, None, None, None
