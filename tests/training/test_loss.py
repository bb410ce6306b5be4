"""The loss, of full logits and sharded over the vocabulary, equals torch's cross-entropy."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshtrain.training.loss import MeanLoss, TokenLoss, count_trained_tokens
from tests.ranks import run_on_ranks

BATCH, SEQUENCE = 3, 5


@dataclass(frozen=True)
class Problem:
    """Logits and labels for a loss."""

    vocabulary: int
    dtype: torch.dtype = torch.float64
    scale: float = 1.0
    num_trained: int | None = None

    def make(self) -> tuple[Tensor, Tensor]:
        stream = torch.Generator().manual_seed(self.vocabulary)
        logits = torch.randn(BATCH, SEQUENCE, self.vocabulary, generator=stream, dtype=torch.float64) * self.scale
        labels = torch.randint(0, self.vocabulary, (BATCH, SEQUENCE), generator=stream)
        # The first and the last token of every shard are among the labels.
        labels.view(-1)[:4] = torch.tensor([0, self.vocabulary - 1, self.vocabulary // 2, (self.vocabulary - 1) // 2])
        labels.view(-1)[9 if self.num_trained is None else self.num_trained :] = -100
        return logits.to(self.dtype), labels


PROBLEMS = (
    Problem(10),
    Problem(11),
    Problem(101),
    Problem(11, scale=1e4),
    Problem(11, num_trained=0),
    Problem(11, num_trained=1),
    Problem(11, torch.float32),
    Problem(101, torch.bfloat16),
)


def differentiate(loss: MeanLoss, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    before = logits.detach().clone()
    value = loss(logits, labels)
    value.backward()
    assert torch.equal(logits, before), "the logits were changed in place"
    assert logits.grad is not None
    return value.detach(), logits.grad


def expected(problem: Problem, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return torch's mean loss, computed in at least float32, and its gradient."""
    logits, labels = problem.make()
    logits = logits.requires_grad_()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    value = F.cross_entropy(wide, labels.flatten(), ignore_index=-100, reduction="sum") / num_tokens
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


def check(problem: Problem, value: Tensor, gradient: Tensor, num_tokens: int) -> None:
    expected_value, expected_gradient = expected(problem, num_tokens)
    assert value.dtype == expected_value.dtype, "bfloat16 logits are summed in float32"
    assert gradient.dtype == problem.dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}[problem.dtype]
    assert torch.allclose(value, expected_value, rtol=tolerance, atol=0), problem
    # The gradient itself is bfloat16, so one rounding may differ.
    rtol = 2**-7 if problem.dtype == torch.bfloat16 else 0
    assert torch.allclose(gradient, expected_gradient, rtol=rtol, atol=tolerance), problem
    assert bool(gradient.isfinite().all())
    if problem.num_trained == 0:
        assert value.item() == 0.0
        assert not gradient.any()


def sharded_losses() -> list[tuple[Tensor, Tensor]]:
    rank, size, answers = dist.get_rank(), dist.get_world_size(), []
    for problem in PROBLEMS:
        logits, labels = problem.make()
        loss = TokenLoss(problem.vocabulary, dist.group.WORLD).mean_over(torch.tensor(7))
        answers.append(differentiate(loss, logits.chunk(size, -1)[rank], labels))
    return answers


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_loss_equals_the_cross_entropy_of_torch(world_size: int) -> None:
    ranks = run_on_ranks(world_size, sharded_losses)
    for problem, answers in zip(PROBLEMS, zip(*ranks, strict=True), strict=True):
        values = [value for value, _ in answers]
        assert all(torch.equal(value, values[0]) for value in values), "the loss is the same on all processes"
        check(problem, values[0], torch.cat([gradient for _, gradient in answers], -1), num_tokens=7)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_loss_of_full_logits_equals_the_cross_entropy_of_torch(problem: Problem) -> None:
    loss = TokenLoss(problem.vocabulary, None).mean_over(torch.tensor(7))
    check(problem, *differentiate(loss, *problem.make()), num_tokens=7)


def test_losses_of_microbatches_add_up_to_the_mean_over_all_tokens() -> None:
    logits, labels = Problem(11).make()
    loss = TokenLoss(11, None).mean_over(count_trained_tokens(labels))
    assert loss.divisor.item() == 9
    # The last microbatch has no trained token.
    total = sum(loss(part, targets) for part, targets in zip(logits.split(1), labels.split(1), strict=True))
    mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert torch.allclose(total, mean, rtol=1e-14, atol=0)


def test_trained_tokens_are_counted() -> None:
    assert count_trained_tokens(torch.tensor([[1, -100], [-100, 0]])).item() == 2
    assert count_trained_tokens(torch.full((2, 3), -100)).item() == 0
