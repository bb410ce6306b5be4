"""The Kullback-Leibler divergence of a model from its teacher, over logits that may be sharded."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshtrain.parallel.tensor.collectives import max_over_shards
from meshtrain.parallel.transposable import sum_over


def summed_divergence(
    logits: Tensor, teacher: Tensor, counted: Tensor, temperature: float, group: ProcessGroup | None
) -> Tensor:
    """Return the () sum of KL(teacher || model) over tokens, in nats, of logits / temperature.

    Args:
        logits: (tokens, vocab) or this process's (tokens, vocab/tp).
        teacher: the same of the teacher, without a gradient.
        counted: (tokens,) bool, which tokens count.
        temperature: that the logits are divided by.
        group: the tp group, if the logits are sharded over it; else None.

    Source: Hinton et al. (arXiv:1503.02531), section 2.
    """
    found: Tensor = _Divergence.apply(logits, teacher, counted, temperature, group)  # type: ignore[no-untyped-call]
    return found


class _Divergence(torch.autograd.Function):
    """With sharded logits, each call makes two small reductions."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: Tensor,
        teacher: Tensor,
        counted: Tensor,
        temperature: float,
        group: ProcessGroup | None,
    ) -> Tensor:
        own, other = logits / temperature, teacher / temperature
        largest = torch.stack([own.amax(-1), other.amax(-1)])
        if group is not None:
            largest = max_over_shards(largest, group)
        own -= largest[0].unsqueeze(-1)
        other -= largest[1].unsqueeze(-1)
        gap = other - own
        other.exp_()
        # Where the teacher has a logit of -inf, the model may have one too: such tokens count 0.
        gap = gap.mul_(other).masked_fill_(other == 0, 0.0).sum(-1)
        own.exp_()
        sums = torch.stack([own.sum(-1), other.sum(-1), gap])
        own_total, other_total, gap = sums if group is None else sum_over(sums, group)
        own /= own_total.unsqueeze(-1)
        other /= other_total.unsqueeze(-1)
        ctx.save_for_backward(own.sub_(other), counted)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        each = gap / other_total - other_total.log() + own_total.log()
        return each.masked_fill(~counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        difference, counted = ctx.saved_tensors  # type: ignore[attr-defined]
        difference *= (counted * (gradient / ctx.temperature)).unsqueeze(-1)  # type: ignore[attr-defined]
        return difference, None, None, None, None
