"""Gradients of weights are computed while those of their inputs travel, and are the same."""

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
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

from meshtrain.compat.autograd import is_view
from meshtrain.compat.operators_seen import name_of
from meshtrain.parallel.tensor.late_gradients import Entrance, _Factors
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


class Last(nn.Module):
    """One projection whose result the loss is linear in, or that is changed in place."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first = kind(*((8, 6) if kind is Conv1D else (6, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.tanh())


def shard(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the outputs of all projections over the processes."""
    entrance = Entrance(Region(mesh.get_group(), sequence_parallel=False, streams=None, posts_sums=True), block)
    for module in block.children():
        dim = 1 if isinstance(module, Conv1D) else 0
        for kind, value in list(module.named_parameters()):
            shards = distribute_tensor(value.detach(), mesh, [Shard(dim if kind == "weight" else 0)])
            module.register_parameter(kind, nn.Parameter(shards))
        become_sharded(module)
        module.enter = module.leave = identity
        module.bias_is_full, module.is_columnwise = False, True
    block.register_forward_pre_hook(lambda _, args: (entrance(args[0]), *args[1:]))
    block.entrance = entrance
    return block


def both(kind: type[nn.Module], block: Callable[[type[nn.Module]], nn.Module] = Block) -> tuple[Any, Any, Tensor]:
    """Return the block in one piece and in shards, and an input."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = block(kind).double()
    shards = block(kind).double()
    shards.load_state_dict(whole.state_dict())
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return whole, shard(shards, mesh), x


def own(value: Tensor) -> Tensor:
    """Return the columns of this process."""
    return value.chunk(dist.get_world_size(), -1)[dist.get_rank()]


def assert_same(whole: nn.Module, shards: nn.Module, x: Tensor, loss: Callable[[Any, Tensor], Tensor]) -> None:
    """Compare the gradients of input and parameters. The loss is a sum over outputs."""
    gradients = []
    for block in (whole, shards):
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        # What comes before a block is never a leaf.
        loss(block, leaf * 1.0).backward(retain_graph=True)
        found = [leaf.grad, *(it.grad for it in block.parameters())]
        gradients.append([it.full_tensor() if isinstance(it, DTensor) else it for it in found])
    for wanted, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def penalty(block: Block, x: Tensor) -> Tensor:
    """Return the squared gradient of the input, whose derivative passes the weights twice."""
    (gradient,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    return gradient.square().sum()


def second_penalty(block: Block, x: Tensor) -> Tensor:
    """Return the squared gradient of the penalty."""
    (gradient,) = torch.autograd.grad(penalty(block, x), x, create_graph=True)
    return gradient.square().sum()


def recomputed(block: Block, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(block, x, use_reentrant=False).square().sum()
    return result


def recomputed_inside(block: Block, x: Tensor) -> Tensor:
    """Recompute the projections without their block, after other passes of the block."""
    inner = block.forward
    block.forward = lambda x: checkpoint(inner, x, use_reentrant=False)  # type: ignore[method-assign]
    try:
        loss = block(x).square().sum()
    finally:
        del block.forward
    with torch.no_grad():
        block(x)
    block(x.detach())
    return loss


def around_a_pass(block: Block, x: Tensor, wanted: Callable[[], list[Tensor]]) -> Tensor:
    """Run a pass for some gradients while the backward pass leaves the block."""
    entered: list[Tensor] = []
    handle = block.first.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    loss: Tensor = block(x).square().sum()
    handle.remove()

    def pass_again(gradient: Tensor) -> None:
        inside.remove()
        torch.autograd.grad(loss, wanted(), retain_graph=True)

    inside = entered[0].register_hook(pass_again)
    return loss


def plain(block: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = block(x).square().sum()
    return result


def compare_blocks(kind: type[nn.Module]) -> None:
    whole, shards, x = both(kind)
    for loss in (plain, recomputed, recomputed_inside, penalty, second_penalty):
        assert_same(whole, shards, x, loss)
    assert_same(whole, shards, x[0, 0], plain)
    assert_same(whole, shards, x, lambda block, x: around_a_pass(block, x, lambda: [x]))
    assert_same(whole, shards, x, lambda block, x: around_a_pass(block, x, lambda: [*block.parameters()]))
    leave_a_pass(whole, shards, x)
    fail_in_a_backward_pass(whole, shards, x)
    freeze(whole, shards, x)


def leave_a_pass(whole: Any, shards: Any, x: Tensor) -> None:
    """Go on after a pass that has ended between the projections."""
    with pytest.raises(InterruptedError):
        shards(x.clone().requires_grad_() * 1.0, fails=True)
    assert [*shards.entrance._ready] == [shards.second]
    with torch.no_grad():
        shards.entrance(x)
        assert not shards.entrance._ready
        torch.testing.assert_close(shards(x), own(whole(x)), rtol=1e-12, atol=1e-12)
    assert_same(whole, shards, x, plain)


def fail_in_a_backward_pass(whole: Any, shards: Any, x: Tensor) -> None:
    """Go on after a pass that has ended before the wait for a sum: the next one frees that."""
    sums: list[Any] = []

    def fail(gradient: Tensor) -> None:
        raise InterruptedError

    def look(_: nn.Module, args: tuple[Tensor]) -> None:
        args[0].register_hook(lambda gradient: sums.append(weakref.ref(gradient.untyped_storage())))

    handles = shards.first.register_forward_pre_hook(look), shards.second.weight.register_hook(fail)
    with pytest.raises(InterruptedError):
        plain(shards, x.clone().requires_grad_() * 1.0).backward()
    for handle in handles:
        handle.remove()
    assert_same(whole, shards, x, plain)
    assert len(sums) == 2
    assert_freed(sums)


def assert_freed(references: list[Any]) -> None:
    # A thread of gloo may hold a sum a moment longer.
    deadline = time.monotonic() + 10
    while any(it() is not None for it in references) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert [it() for it in references if it() is not None] == []


def freeze(whole: Any, shards: Any, x: Tensor) -> None:
    """Train the biases and one weight, and ask for the gradients of some inputs of the graph."""
    assert shards.first.may_be_late(x)
    shards.first.product = F.linear
    assert not shards.first.may_be_late(x)
    del shards.first.product
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
    autocast = torch.autocast("cpu", torch.bfloat16)
    for inside in (False, True):
        found = []
        for block in (whole.float(), shards.float()):
            block.zero_grad()
            if inside:
                block.forward = autocast(block.forward)
            with nullcontext() if inside else autocast:
                loss = block(x.float().requires_grad_() * 1.0).float().square().sum()
            loss.backward()
            found.append(block.second.weight.grad)
        torch.testing.assert_close(found[1].full_tensor(), found[0], rtol=0.05, atol=0.05)


def test_autocast_computes_gradients_at_once() -> None:
    run_on_ranks(2, in_autocast)


def is_sharded(block: nn.Module) -> bool:
    return isinstance(block.get_parameter("first.weight"), DTensor)


def weights_of_all_columns(block: nn.Module, y: Tensor) -> Tensor:
    """Return constant weights (8,) of the outputs that this process has."""
    weights = torch.linspace(1, 2, 8, dtype=y.dtype)
    return own(weights) if is_sharded(block) else weights


def linear_penalty(block: nn.Module, x: Tensor) -> Tensor:
    """Return the penalty of a loss that is linear in the product: no derivative passes it again."""
    y = block(x)
    (gradient,) = torch.autograd.grad((y * weights_of_all_columns(block, y)).sum(), x, create_graph=True)
    return gradient.square().sum()


def penalty_after_another_pass(block: nn.Module, x: Tensor) -> Tensor:
    """Do the same after passes that ask for the gradients of inputs alone."""
    y = block(x)
    loss = (y * weights_of_all_columns(block, y)).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    return gradient.square().sum()


def change_in_place(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    # FSDP2 would warn of one.
    assert not (is_sharded(block) and is_view(y))
    return F.relu(y, inplace=True).square().sum()


def compare_last(kind: type[nn.Module]) -> None:
    whole, shards, x = both(kind, Last)
    for loss in (linear_penalty, penalty_after_another_pass, change_in_place):
        assert_same(whole, shards, x, loss)
    # What a pass with `create_graph` computes from dies with the result.
    leaf, inputs = x.clone().requires_grad_(), []
    shards.first.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    torch.autograd.grad(shards(leaf * 1.0).square().sum(), leaf, create_graph=True)
    assert len(inputs) == 1
    assert_freed(inputs)
    # A pass for inputs alone keeps nothing for the weights.
    gradients: list[Any] = []
    y = shards(leaf * 1.0)
    y.register_hook(lambda gradient: gradients.append(weakref.ref(gradient.untyped_storage())))
    torch.autograd.grad(y.square().sum(), leaf, retain_graph=True)
    assert len(gradients) == 1
    assert_freed(gradients)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
def test_gradients_of_inputs_alone_leave_nothing_for_later_passes(kind: type[nn.Module]) -> None:
    run_on_ranks(2, compare_last, kind)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_factors_are_multiplied_to_the_bits_of_torch(dtype: torch.dtype, *, is_transposed: bool) -> None:
    stream = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(*it, generator=stream).to(dtype) for it in ((128, 32), (48, 32), (128, 48)))
    weight = (weight.T.contiguous() if is_transposed else weight).requires_grad_()
    (torch.mm(x, weight) if is_transposed else F.linear(x, weight)).backward(gradient)
    assert weight.grad is not None
    assert torch.equal(_Factors(is_transposed=is_transposed, are_awaited=True).product(x, gradient), weight.grad)
