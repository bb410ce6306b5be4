"""Gradients of weights are computed while those of their inputs travel, and are the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.fake import name_of
from meshtrain.parallel.tensor.late_gradients import Entrance
from meshtrain.parallel.tensor.modules import become_sharded
from meshtrain.parallel.tensor.region import Region, identity
from tests.parity import Case, batches, build, fill, smallest_part, stock_weights
from tests.ranks import run_on_ranks

LAYERS = 4
TP = Case("llama-untied", (1, 1, 1, 2))


class Order(TorchDispatchMode):
    """Notes the numbers of matrix products between the begin of each sum and the wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[int] = []
        self.travels = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)[1]
        if name.startswith(("all_reduce", "reduce_scatter")):
            self.products.append(0)
            self.travels = True
        elif name == "wait_tensor":
            self.travels = False
        elif name == "mm" and self.travels:
            self.products[-1] += 1
        return func(*args, **(kwargs or {}))


def products_meanwhile(cases: list[Case]) -> list[list[int]]:
    """Return the numbers of products in the backward pass while each sum travels."""
    found = []
    for case in cases:
        pipeline = build(case)
        fill(pipeline, stock_weights(case.model))
        batch = smallest_part(pipeline, batches()[0])
        loss = pipeline.stages[0].compute((), input_ids=batch["input_ids"]).square().sum()
        with Order() as order:
            loss.backward()
        found.append(order.products)
    return found


def test_gradients_of_weights_are_computed_while_those_of_inputs_travel() -> None:
    split = replace(TP, sequence_parallel=True)
    gpt2, recomputed = replace(TP, model="gpt2-odd"), replace(TP, recompute=1)
    for one, parts, of_gpt2, again in run_on_ranks(2, products_meanwhile, [TP, split, gpt2, recomputed]):
        # Head; gate and up; query, key and value.
        assert one == parts == [1, *[2, 3] * LAYERS]
        assert of_gpt2 == [1, *[1, 3] * LAYERS]
        # The sums of recomputed results are awaited at once.
        assert [it for it in again if it] == one


class Block(nn.Module):
    """Two projections of the same input, of which the first one is used twice."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        size = (8, 6) if kind is Conv1D else (6, 8)
        self.first, self.second = kind(*size), kind(*size)

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        y = self.first(x)
        if fails:
            raise InterruptedError
        return (y * self.second(x)).tanh() + self.first(2 * x)


def shard(block: Block, mesh: DeviceMesh) -> Block:
    """Shard the outputs of both projections over two processes."""
    entrance = Entrance(Region(mesh.get_group(), sequence_parallel=False, streams=None, posts_sums=True), block)
    for module in (block.first, block.second):
        dim = 1 if isinstance(module, Conv1D) else 0
        for kind, value in list(module.named_parameters()):
            shards = distribute_tensor(value.detach(), mesh, [Shard(dim if kind == "weight" else 0)])
            module.register_parameter(kind, nn.Parameter(shards))
        become_sharded(module)
        module.enter = module.leave = identity
        module.bias_is_full = False
    block.register_forward_pre_hook(lambda _, args: (entrance(args[0]), *args[1:]))
    return block


def both(kind: type[nn.Module]) -> tuple[Block, Block, Tensor]:
    """Return the block in one piece and in shards, and an input."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = Block(kind).double()
    shards = Block(kind).double()
    shards.load_state_dict(whole.state_dict())
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return whole, shard(shards, mesh), x


def own(value: Tensor) -> Tensor:
    """Return the columns of this process."""
    return value.chunk(dist.get_world_size(), -1)[dist.get_rank()]


def assert_same(whole: Block, shards: Block, x: Tensor, loss: Callable[[Block, Tensor], Tensor]) -> None:
    """Compare the gradients of input and parameters. The loss is a sum over outputs."""
    gradients = []
    for block in (whole, shards):
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        # What comes before a block is never a leaf.
        loss(block, leaf * 1.0).backward()
        found = [leaf.grad, *(it.grad for it in block.parameters())]
        gradients.append([it.full_tensor() if isinstance(it, DTensor) else it for it in found])
    for wanted, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def penalty(block: Block, x: Tensor) -> Tensor:
    """Return the squared gradient of the input, whose derivative passes the weights twice."""
    (gradient,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    return gradient.square().sum()


def recomputed(block: Block, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(block, x, use_reentrant=False).square().sum()
    return result


def compare_blocks(kind: type[nn.Module]) -> None:
    whole, shards, x = both(kind)
    for loss in (lambda block, x: block(x).square().sum(), recomputed):
        assert_same(whole, shards, x, loss)
    # Each process has the penalty of the complete gradient, and a part of its derivative.
    gradients = []
    for block in (whole, shards):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(penalty(block, leaf * 1.0), [leaf, *block.parameters()]))
    for wanted, found in zip(*gradients, strict=True):
        full = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(full, wanted, rtol=1e-12, atol=1e-12)
    leave_a_pass(whole, shards, x)
    freeze(whole, shards, x)


def leave_a_pass(whole: Block, shards: Block, x: Tensor) -> None:
    """Go on after a pass that has ended between the projections."""
    with pytest.raises(InterruptedError):
        shards(x.clone().requires_grad_() * 1.0, fails=True)
    with torch.no_grad():
        torch.testing.assert_close(shards(x), own(whole(x)), rtol=1e-12, atol=1e-12)
    assert_same(whole, shards, x, lambda block, x: block(x).square().sum())


def freeze(whole: Block, shards: Block, x: Tensor) -> None:
    """Train the biases and one weight, and ask for the gradients of some inputs of the graph."""
    for block in (whole, shards):
        block.first.weight.requires_grad = False
    leaf, other = (x.clone().requires_grad_() for _ in range(2))
    wanted = torch.autograd.grad(whole(leaf * 1.0).square().sum(), [whole.second.weight])
    found = torch.autograd.grad(shards(other * 1.0).square().sum(), [shards.second.weight])
    torch.testing.assert_close(found[0].full_tensor(), wanted[0], rtol=1e-12, atol=1e-12)
    assert all(it.grad is None for it in (leaf, other))


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
def test_late_gradients_are_those_of_the_block_in_one_piece(kind: type[nn.Module]) -> None:
    run_on_ranks(2, compare_blocks, kind)


def in_autocast() -> None:
    """A product in autocast has factors of other formats than the weight."""
    whole, shards, x = both(nn.Linear)
    found = []
    for block in (whole.float(), shards.float()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = block(x.float().requires_grad_() * 1.0).float().square().sum()
        loss.backward()
        found.append(block.second.weight.grad)
    torch.testing.assert_close(found[1].full_tensor(), found[0], rtol=0.05, atol=0.05)


def test_autocast_computes_gradients_at_once() -> None:
    run_on_ranks(2, in_autocast)


def test_the_factors_of_a_gradient_are_multiplied_as_by_torch() -> None:
    """Both ways give the same bits."""
    x, weight = torch.randn(2, 64, 32), torch.randn(48, 32, requires_grad=True)
    F.linear(x, weight).square().sum().backward()
    gradient = 2 * F.linear(x, weight).detach()
    assert weight.grad is not None
    assert torch.equal(gradient.flatten(0, -2).T @ x.flatten(0, -2), weight.grad)
