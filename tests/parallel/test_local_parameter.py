"""Stock optimizers update local parts of DTensors like full parameters in one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from meshtrain.errors import ModelError
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.local_parameter import LocalParameter, as_local, choose_kernels, full_parameter
from tests.ranks import run_on_ranks

# One parameter with rows that two processes share unevenly, a replicated one, and a plain tensor.
SHAPES = {"rows": (5, 4), "columns": (3, 5), "copied": (3,), "plain": (2, 3)}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "copied": Replicate()}
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True, "amsgrad": True}),
    ("Adam", {"foreach": False}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"fused": True}),
    ("Adagrad", {"foreach": True}),
    ("RMSprop", {"centered": True}),
    ("NAdam", {}),
]


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parameters() -> dict[str, nn.Parameter]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        name: nn.Parameter(distribute_tensor(value, mesh, [PLACEMENTS[name]]) if name in PLACEMENTS else value)
        for name, value in values(0).items()
    }


def give_gradients(held: dict[str, nn.Parameter], seed: int) -> None:
    """Create gradients with autograd, as the derivative of the sum of parameter * gradient."""
    for name, gradient in values(seed).items():
        if seed == 2 and name == "rows":
            continue
        parameter = held[name]
        if name in PLACEMENTS and isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        (parameter * gradient).sum().backward()


def train(held: dict[str, nn.Parameter], optimizer: Optimizer, *, set_to_none: bool) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(1, 5):
        optimizer.zero_grad(set_to_none=set_to_none)
        give_gradients(held, step)
        optimizer.step()
        scheduler.step()


def build(name: str, options: dict[str, Any], held: list[nn.Parameter]) -> Optimizer:
    return getattr(torch.optim, name)(held, lr=0.1, **options)


def train_sharded() -> list[dict[str, Tensor]]:
    results = []
    for name, options in OPTIMIZERS:
        for set_to_none in (True, False):
            held = parameters()
            optimizer = build(name, options, [as_local(parameter) for parameter in held.values()])
            train(held, optimizer, set_to_none=set_to_none)
            shapes = {t.shape for t in optimizer.state[optimizer.param_groups[0]["params"][0]].values() if t.dim()}
            assert shapes <= {local_tensor(held["rows"].detach()).shape}
            with torch.no_grad():
                results.append({n: p.full_tensor() if n in PLACEMENTS else p.detach() for n, p in held.items()})
    return results


def train_full() -> list[dict[str, Tensor]]:
    results = []
    for name, options in OPTIMIZERS:
        for set_to_none in (True, False):
            held = {key: nn.Parameter(value) for key, value in values(0).items()}
            train(held, build(name, options, list(held.values())), set_to_none=set_to_none)
            results.append({key: parameter.detach() for key, parameter in held.items()})
    return results


def test_stock_optimizers_update_local_parts_like_full_parameters() -> None:
    expected = train_full()
    for found in run_on_ranks(2, train_sharded):
        for case, (here, there) in enumerate(zip(found, expected, strict=True)):
            for name in SHAPES:
                assert not torch.equal(there[name], values(0)[name])
                torch.testing.assert_close(here[name], there[name], rtol=1e-6, atol=1e-7, msg=f"{case} {name}")


def compare_local_and_full_gradients() -> None:
    whole = parameters()["rows"]
    local = as_local(whole)
    assert isinstance(local, nn.Parameter)
    assert isinstance(local, LocalParameter)
    assert local.is_leaf
    assert local.requires_grad
    assert full_parameter(local) is whole
    assert local.data_ptr() == local_tensor(whole.detach()).data_ptr()
    assert local.grad is None

    give_gradients({"rows": whole, **{name: nn.Parameter(torch.ones(())) for name in SHAPES if name != "rows"}}, 1)
    assert torch.equal(local.grad, local_tensor(whole.grad))
    local.grad.mul_(2)
    assert torch.equal(whole.grad.full_tensor(), 2 * values(1)["rows"])
    local.grad = torch.ones_like(local)
    assert whole.grad.placements == whole.placements
    assert torch.equal(whole.grad.full_tensor(), torch.ones(5, 4))
    whole.sum().backward()
    assert torch.equal(whole.grad.full_tensor(), torch.full((5, 4), 2.0))
    whole.grad = None
    whole.sum().backward()
    assert whole.grad.placements != whole.placements, "torch leaves this one whole"
    assert local.grad.shape == local.shape
    local.grad.add_(1)
    assert torch.equal(whole.grad.full_tensor(), torch.full((5, 4), 2.0))
    local.grad = None
    assert whole.grad is None
    whole.sum().backward()
    del local.grad
    assert whole.grad is None

    rows = local.shape[0]
    with pytest.raises(ModelError) as raised:
        local.grad = torch.ones(5, 4)
    assert str(raised.value) == (
        f"the gradient of a local part must be a plain tensor: ({rows}, 4) float32 on cpu; this is a tensor: (5, 4) "
        "float32 on cpu; pass the local part, or set the gradient of the model's parameter"
    )
    with pytest.raises(ModelError, match=r"this is a DTensor: \(5, 4\)"):
        local.grad = torch.zeros_like(whole)
    with pytest.raises(ModelError, match="an optimizer of a parallel model cannot be copied"):
        copy.deepcopy(build("SGD", {}, [local]))


def test_gradient_of_a_local_part_is_that_of_the_full_parameter() -> None:
    run_on_ranks(2, compare_local_and_full_gradients)


def frozen_and_plain() -> None:
    held = parameters()
    assert as_local(held["plain"]) is held["plain"]
    assert full_parameter(held["plain"]) is held["plain"]
    held["rows"].requires_grad = False
    assert not as_local(held["rows"]).requires_grad


def test_parameter_that_is_not_a_dtensor_is_used_directly() -> None:
    run_on_ranks(2, frozen_and_plain)


def scaled() -> tuple[float, bool, bool]:
    """Return the unscaled gradient, and whether steps without and with an overflow ran."""
    held = parameters()
    local = as_local(held["rows"])
    optimizer = build("SGD", {}, [local])
    scaler = ShardedGradScaler(device="cpu", init_scale=4.0)
    taken = []
    for overflows in (False, True):
        before = local.detach().clone()
        optimizer.zero_grad()
        scaler.scale(held["rows"].sum().full_tensor()).backward()
        if overflows and dist.get_rank() == 1:
            local.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        largest = local.grad[-1, -1].item()
        scaler.step(optimizer)
        scaler.update()
        taken.append(not torch.equal(local.detach(), before))
    return largest, *taken


def test_sharded_gradient_scaler_skips_a_step_on_all_processes() -> None:
    assert run_on_ranks(2, scaled) == [(1.0, True, False)] * 2


def test_kernels_are_chosen_like_in_torch() -> None:
    on_cpu = build("AdamW", {}, [nn.Parameter(torch.zeros(2))])
    choose_kernels(on_cpu)
    assert on_cpu.param_groups[0]["foreach"] is None
    if not torch.cuda.is_available():
        return
    for options, expected in (({}, True), ({"fused": True}, None), ({"foreach": False}, False)):
        optimizer = build("AdamW", options, [nn.Parameter(torch.zeros(2, device="cuda"))])
        choose_kernels(optimizer)
        assert optimizer.param_groups[0]["foreach"] is expected


def gradients_through_local_parts() -> None:
    """Compare the gradient of a parameter with that of its local part."""
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Shard(1), Replicate()):
        full = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh, [placement]))
        factor = torch.randn_like(full.to_local())
        transposed = factor.T.contiguous().T
        for weight in (factor, transposed, torch.ones(()).expand_as(factor)):
            # The gradient of the local part is `weight` itself, with its strides.
            (found,) = torch.autograd.grad(local_tensor(full), full, weight)
            assert isinstance(found, DTensor)
            assert (found.placements, found.shape, found.stride()) == (full.placements, full.shape, full.stride())
            assert found.to_local().stride() == full.to_local().stride()
            torch.testing.assert_close(found.to_local(), weight.contiguous(), rtol=0, atol=0)
        (gradient,) = torch.autograd.grad((local_tensor(full) ** 3).sum(), full, create_graph=True)
        (second,) = torch.autograd.grad(gradient.to_local().sum(), full)
        torch.testing.assert_close(second.to_local(), 6 * full.detach().to_local())
        Unused.apply(local_tensor(full)).sum().backward()
        assert full.grad is None
    # The gradient of a partial sum is that of the sum, as `to_local` has it.
    part = DTensor.from_local(torch.ones(2, requires_grad=True), mesh, [Partial()])
    (gradient,) = torch.autograd.grad(local_tensor(part).sum(), part)
    assert gradient.placements == (Replicate(),)


class Unused(torch.autograd.Function):
    """Returns zeros, and no gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> None:
        return None


def test_the_gradient_of_a_local_part_has_the_layout_of_the_parameter() -> None:
    run_on_ranks(2, gradients_through_local_parts)
