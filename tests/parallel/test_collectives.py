"""Every collective, forward and backward, equals one process's computation on all tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.parallel.tensor.collectives import (
    copy_to_shards,
    gather_sequence,
    gather_vocabulary,
    join_sequence,
    max_over_shards,
    reduce_from_shards,
    scatter_sequence,
    shard_width,
    split_sequence,
    sum_over_shards,
)
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
    total, largest = sum_over_shards(x, dist.group.WORLD), max_over_shards(x, dist.group.WORLD)
    assert torch.equal(x, before), "the input was changed in place"
    return total, largest, [shard_width(size, dist.group.WORLD) for size in (1, 6, 7, 101)]


def test_sum_and_maximum_without_gradients() -> None:
    for total, largest, widths in run_on_ranks(3, reduce_without_gradient):
        assert total.tolist() == [6.0, -30.0, 18.0]
        assert largest.tolist() == [3.0, -5.0, 9.0]
        assert widths == [1, 2, 3, 34]
