"""Every collective, forward and backward, equals one process's computation on all tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from meshtrain.parallel.tensor.collectives import (
    copy_and_post,
    copy_to_shards,
    gather_sequence,
    gather_vocabulary,
    join_sequence,
    max_over_shards,
    reduce_from_shards,
    reduce_result,
    scatter_sequence,
    shard_width,
    split_sequence,
)
from meshtrain.parallel.transposable import _holders_alone, await_posted, sum_over
from tests.ranks import run_on_ranks

BATCH, SEQUENCE, HIDDEN = 2, 12, 5
Shards = list[Tensor]


def same(xs: Shards) -> Shards:
    return xs


def summed(xs: Shards) -> Shards:
    return [torch.stack(xs).sum(0)] * len(xs)


def joined(xs: Shards) -> Shards:
    return [torch.cat(xs, 1)] * len(xs)


def parts(xs: Shards) -> Shards:
    return list(xs[0].chunk(len(xs), 1))


def parts_of_sum(xs: Shards) -> Shards:
    return parts(summed(xs))


@dataclass(frozen=True)
class Collective:
    """A collective, with its result and gradient as functions of the tensors of all processes."""

    function: Callable
    takes: str
    gives: str
    forward: Callable[[Shards], Shards]
    backward: Callable[[Shards], Shards]


# "whole": the full tensor, equal on all processes; "partial": of full shape, different on each;
# "part": a part of the sequence.
COLLECTIVES = {
    "copy_to_shards": Collective(copy_to_shards, "whole", "partial", same, summed),
    "reduce_from_shards": Collective(reduce_from_shards, "partial", "whole", summed, same),
    "reduce_result": Collective(lambda x, group: reduce_result(x.clone(), group), "partial", "whole", summed, same),
    "gather_sequence": Collective(gather_sequence, "part", "partial", joined, parts_of_sum),
    "scatter_sequence": Collective(scatter_sequence, "partial", "part", parts_of_sum, joined),
    "split_sequence": Collective(split_sequence, "whole", "part", parts, joined),
    "join_sequence": Collective(join_sequence, "part", "whole", joined, parts),
}


def draw(kind: str, seed: int) -> Shards:
    """Return the tensors of all processes, equal on each."""
    size, stream = dist.get_world_size(), torch.Generator().manual_seed(seed)
    length = SEQUENCE // size if kind == "part" else SEQUENCE
    tensors = [torch.randn(BATCH, length, HIDDEN, generator=stream, dtype=torch.float64) for _ in range(size)]
    return [tensors[0]] * size if kind == "whole" else tensors


def differentiate(function: Callable, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    # The gradient is not contiguous, like that of a transposed activation.
    x = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    before = x.detach().clone()
    y = function(x, dist.group.WORLD)
    y.backward(gradient.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(x, before), "the input was changed in place"
    assert x.grad is not None
    return y.detach(), x.grad


def run_collectives() -> dict[str, tuple[float, float]]:
    rank, errors = dist.get_rank(), {}
    for seed, (name, collective) in enumerate(COLLECTIVES.items()):
        xs, gradients = draw(collective.takes, seed), draw(collective.gives, 100 + seed)
        found, gradient = differentiate(collective.function, xs[rank], gradients[rank])
        expected = collective.forward(xs)[rank], collective.backward(gradients)[rank]
        assert found.shape == expected[0].shape
        assert gradient.shape == expected[1].shape
        errors[name] = ((found - expected[0]).abs().max().item(), (gradient - expected[1]).abs().max().item())
    return errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_forward_and_backward(world_size: int) -> None:
    for errors in run_on_ranks(world_size, run_collectives):
        assert errors.keys() == COLLECTIVES.keys()
        for name, found in errors.items():
            assert max(found) < 1e-15 * 8, f"{name}: {found}"


def run_vocabulary(vocabulary: int) -> tuple[bool, bool, list[int]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn(BATCH, 3, vocabulary, generator=stream, dtype=torch.float64)
    gradient = torch.randn(BATCH, 3, vocabulary, generator=stream, dtype=torch.float64)
    shards = list(logits.chunk(size, -1)) + [logits[..., :0]] * (size - len(logits.chunk(size, -1)))
    gradients = list(gradient.chunk(size, -1)) + [gradient[..., :0]] * (size - len(gradient.chunk(size, -1)))
    function = partial(gather_vocabulary, vocabulary=vocabulary)
    found, found_gradient = differentiate(lambda x, group: function(x, group=group), shards[rank], gradient)
    return torch.equal(found, logits), torch.equal(found_gradient, gradients[rank]), [s.shape[-1] for s in shards]


@pytest.mark.parametrize(
    ("world_size", "vocabulary", "widths"),
    [(2, 8, [4, 4]), (2, 101, [51, 50]), (3, 101, [34, 34, 33]), (4, 9, [3, 3, 3, 0])],
)
def test_vocabularies_of_any_size_are_sharded(world_size: int, vocabulary: int, widths: list[int]) -> None:
    for forward, backward, found in run_on_ranks(world_size, run_vocabulary, vocabulary):
        assert found == widths
        assert forward
        assert backward


def reduce_without_gradient() -> tuple[Tensor, Tensor, list[int]]:
    x = torch.tensor([1.0, -5.0, 3.0]) * (dist.get_rank() + 1)
    before = x.clone()
    total, largest = sum_over(x, dist.group.WORLD), max_over_shards(x, dist.group.WORLD)
    assert torch.equal(x, before), "the input was changed in place"
    return total, largest, [shard_width(size, dist.group.WORLD) for size in (1, 6, 7, 101)]


def test_sum_and_maximum_without_gradients() -> None:
    for total, largest, widths in run_on_ranks(3, reduce_without_gradient):
        assert total.tolist() == [6.0, -30.0, 18.0]
        assert largest.tolist() == [3.0, -5.0, 9.0]
        assert widths == [1, 2, 3, 34]


def sums_of_results() -> None:
    """Sum results in place, unless the backward pass needs them as they were."""
    group, rank = dist.group.WORLD, dist.get_rank()
    x = torch.full((2, 3), 1.0 + rank, dtype=torch.float64, requires_grad=True)
    weight = torch.eye(3, dtype=torch.float64)

    fresh = F.linear(x, weight)
    address = fresh.data_ptr()
    total = reduce_result(fresh, group)
    assert total.data_ptr() == address
    assert total.eq(3).all()
    # A model may change the result in place.
    total += 1.0
    # The gradients of gradients are shared: an addition gives the same one to both inputs.
    inputs = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    passed = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    outputs = [reduce_result(it + 0.0, group) for it in inputs]
    first, second = torch.autograd.grad(outputs, inputs, passed, create_graph=True)
    vector = torch.ones(3, dtype=torch.float64)
    doubled = torch.autograd.grad(first + second, passed, vector * (1.0 + rank))
    assert all(gradient.eq(3).all() for gradient in doubled)
    # Messages need numbers that follow each other in memory.
    columns = torch.arange(6.0).view(2, 3).T + 1.0
    doubled_columns = reduce_result(columns, group)
    assert doubled_columns.is_contiguous()
    assert torch.equal(doubled_columns, 2 * (torch.arange(6.0).view(2, 3).T + 1.0))
    # `exp` keeps its result for its backward pass.
    (gradient,) = torch.autograd.grad(reduce_result(x.exp(), group).sum(), x)
    torch.testing.assert_close(gradient, x.exp(), rtol=1e-12, atol=0)
    # So does a selective recomputation, which must find the partial sums.
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    result = checkpoint(
        lambda x: reduce_result(F.linear(x, weight), group).square(), x, use_reentrant=False, context_fn=keep
    )
    (gradient,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 2 * 3), rtol=1e-12, atol=0)


def test_a_result_is_summed_in_place_unless_its_backward_pass_needs_it() -> None:
    run_on_ranks(2, sums_of_results)


def enter_and_post(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return copy_and_post(await_posted(x), group)


ENTER = {"awaited": copy_to_shards, "posted": enter_and_post}


def sums_of_gradients(kind: str) -> None:
    """Sum gradients in place, unless something else holds them."""
    enter = ENTER[kind]
    group, rank = dist.group.WORLD, dist.get_rank()
    first, second = (torch.full((2, 3), 1.0, dtype=torch.float64, requires_grad=True) for _ in range(2))
    addresses: list[int] = []
    kept: list[Tensor] = []

    def entered(x: Tensor) -> Tensor:
        passed = enter(x * 1.0, group)
        passed.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
        return passed

    # The gradient is a sum that was computed for this collective alone.
    before = first * 1.0
    before.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    passed = enter(before, group)
    passed.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    (passed * (1.0 + rank) + passed * 2.0).sum().backward()
    assert first.grad is not None
    assert first.grad.eq(7).all()
    assert addresses[0] == addresses[1]
    # An addition gives the same gradient to both of its inputs.
    first.grad = None
    ((entered(first) + entered(second)) * (1.0 + rank)).sum().backward()
    assert first.grad.eq(3).all()
    assert second.grad is not None
    assert second.grad.eq(3).all()
    # The hooks of a program keep gradients as they were.
    first.grad = None
    passed = entered(first)
    passed.register_hook(kept.append)
    passed.retain_grad()
    (passed * (1.0 + rank) + passed * 2.0).sum().backward()
    assert first.grad.eq(7).all()
    assert kept[0].eq(3.0 + rank).all()
    assert passed.grad is not None
    assert passed.grad.eq(3.0 + rank).all()


@pytest.mark.parametrize("kind", ENTER)
def test_a_gradient_is_summed_in_place_unless_something_else_holds_it(kind: str) -> None:
    run_on_ranks(2, sums_of_gradients, kind)


def is_counted() -> bool:
    return _holders_alone.cache_info().currsize > 0


def test_an_import_runs_no_backward_pass() -> None:
    # A rank is a fork of a process that has imported everything. Beside a GPU, a backward pass in
    # that process would forbid those of its forks.
    assert run_on_ranks(1, is_counted) == [False]


class InBackward(torch.autograd.Function):
    """Counts references in a backward pass."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, counts: list[tuple[int, int, int]]) -> Tensor:
        ctx.counts = counts  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.counts.append(_holders_alone.__wrapped__())  # type: ignore[attr-defined]
        return gradient, None


def test_references_to_a_gradient_are_counted_alike_wherever_the_first_sum_is() -> None:
    counts = [_holders_alone.__wrapped__()]
    InBackward.apply(torch.ones(1, requires_grad=True), counts).backward()
    with torch.inference_mode():
        counts.append(_holders_alone.__wrapped__())
    with FakeTensorMode():
        counts.append(_holders_alone.__wrapped__())
    assert len(counts) == 4
    assert len(set(counts)) == 1
