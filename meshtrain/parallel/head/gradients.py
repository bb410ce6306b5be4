"""The loss of hidden states in chunks of tokens, with its gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ChunkLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps hidden states (1, tokens, hidden) and labels (1, tokens) to a () loss.

The losses of all chunks are summed.
"""


def sum_over_chunks(
    hidden: Tensor, labels: Tensor, loss_of: ChunkLoss, chunk_tokens: int, parameters: Mapping[Tensor, Tensor]
) -> Tensor:
    """Return the () sum of the loss over chunks, of whose logits only those of one chunk exist.

    With gradients, those of a chunk are computed while its logits exist. So the head runs forward
    once, and the backward pass only multiplies these gradients.

    Args:
        hidden: (batch, seq, hidden), of the base model.
        labels: (batch, seq).
        loss_of: of a chunk.
        chunk_tokens: number of tokens of each chunk but the last.
        parameters: those of the head that are trained -> what `loss_of` computes with instead. A
            hook of a parameter then sees its gradient once, not once for each chunk.
    """
    assert labels.shape == hidden.shape[:2], f"labels {tuple(labels.shape)} for states {tuple(hidden.shape)}"
    if not torch.is_grad_enabled():
        losses = [loss_of(part, targets) for part, targets in _chunks(hidden, labels, chunk_tokens)]
        return torch.stack(losses).sum()
    collected = _Collected(hidden, parameters)
    for part, targets in _chunks(hidden.detach(), labels, chunk_tokens):
        collected.add(part.requires_grad_(hidden.requires_grad), lambda it, targets=targets: loss_of(it, targets))  # type: ignore[misc]
    return collected.attached()


def _chunks(hidden: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    states, targets = hidden.flatten(0, 1).split(size), labels.flatten().split(size)
    return ((part.unsqueeze(0), some.unsqueeze(0)) for part, some in zip(states, targets, strict=True))


class _Collected:
    """The loss of the chunks so far, and its gradients.

    Args:
        hidden: of all chunks.
        parameters: as for `sum_over_chunks`.
    """

    def __init__(self, hidden: Tensor, parameters: Mapping[Tensor, Tensor]) -> None:
        self._hidden = hidden
        self._parameters, self._stand_ins = [*parameters], [*parameters.values()]
        self._losses: list[Tensor] = []
        self._states: list[Tensor] = []
        self._sums: list[Tensor] = []

    def add(self, part: Tensor, loss_of: Callable[[Tensor], Tensor]) -> None:
        """Compute the loss of one chunk and its gradients, and add them up.

        Args:
            part: hidden states of the chunk, a leaf of autograd.
            loss_of: returns the loss of the chunk.
        """
        loss = loss_of(part)
        self._losses.append(loss.detach())
        if not loss.requires_grad:
            return
        wanted = [part] if part.requires_grad else []
        found = torch.autograd.grad(loss, [*wanted, *self._stand_ins])
        self._states += found[: len(wanted)]
        gradients = found[len(wanted) :]
        if not self._sums:
            # 16-bit formats have too few digits for a sum over many chunks.
            self._sums = [it.to(_summed_in(it.dtype), copy=True) for it in gradients]
        else:
            for total, gradient in zip(self._sums, gradients, strict=True):
                total += gradient

    def attached(self) -> Tensor:
        """Return the () loss, whose backward pass gives the collected gradients."""
        total = torch.stack(self._losses).sum()
        sums = [it.to(parameter.dtype) for it, parameter in zip(self._sums, self._parameters, strict=True)]
        self._sums.clear()
        if not self._states:
            return _Attach.apply(total, sums, *self._parameters)  # type: ignore[no-untyped-call]
        states = torch.cat(self._states, dim=1).view_as(self._hidden)
        self._states.clear()
        return _Attach.apply(total, [states, *sums], self._hidden, *self._parameters)  # type: ignore[no-untyped-call]


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _Attach(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        # Schedules that split the backward pass detach the output of a stage in place, which is an
        # error for a view.
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        # These schedules also run it twice, for the hidden states and then for the parameters. So
        # the gradients are not multiplied in place.
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(gradient * factor if is_needed else None for gradient, is_needed in needed)
