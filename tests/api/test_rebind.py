"""Optimizers that were built before the model became parallel."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import meshtrain
from meshtrain.api.handle import pipeline_of
from meshtrain.errors import ModelError
from meshtrain.models.fused import join_parts
from meshtrain.parallel.local_parameter import LocalParameter
from meshtrain.parallel.pipeline import full_tensor
from tests.api.programs import (
    expected,
    full_parameters,
    make_adam,
    own_part,
    padded_batches,
    parallel,
    stock_model,
    train,
)
from tests.api.test_parallelize import assert_equal
from tests.ranks import run_on_ranks


def momentum(model: Any) -> Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return SGD([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2, momentum=0.9)


def fused(model: Any) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1, fused=True)


def adagrad(model: Any) -> Optimizer:
    return Adagrad(model.parameters(), lr=1e-2, eps=1e-4)


OPTIMIZERS = (momentum, fused, adagrad)


def train_with_state(
    optimize: Callable[[Any], Optimizer], mesh: dict[str, int] | None, name: str
) -> tuple[list[float], Any]:
    """Train two steps on one device, parallelize if there is a mesh, and continue."""
    model: Any = stock_model(name)
    optimizer = optimize(model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    batches = padded_batches()
    train(model, optimizer, batches[:2], lambda batch: batch)
    scheduler.step()
    if mesh is not None:
        model = parallel(model, mesh)
        meshtrain.rebind(optimizer)
    scheduler.step()
    losses = train(model, optimizer, batches[2:], lambda batch: own_part(model, batch) if mesh else batch)
    return losses, full_parameters(model) if mesh else dict(model.named_parameters())


def train_all_with_state(mesh: dict[str, int] | None, name: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [
        (losses, {key: value.detach() for key, value in found.items()})
        for losses, found in (train_with_state(optimize, mesh, name) for optimize in OPTIMIZERS)
    ]


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}, {"pp": 2}], ids=str)
def test_optimizer_with_state_and_its_scheduler_continue(mesh: dict[str, int]) -> None:
    wanted = run_on_ranks(1, train_all_with_state, None, "gpt2-odd")[0]
    for rank in run_on_ranks(2, train_all_with_state, mesh, "gpt2-odd"):
        for (losses, parameters), (want_losses, want_parameters) in zip(rank, wanted, strict=True):
            assert losses == pytest.approx(want_losses, rel=1e-12, abs=0)
            assert_equal(parameters, want_parameters)


def step_without_rebind() -> str:
    model = stock_model("gpt2-tied")
    optimizer = fused(model)
    model = parallel(model, {"tp": 2})
    model(**padded_batches()[0]).loss.backward()
    with pytest.raises(ModelError) as error:
        optimizer.step()
    return str(error.value)


def test_optimizer_that_was_not_rebound_fails_at_its_first_step() -> None:
    assert run_on_ranks(2, step_without_rebind)[0] == (
        "this AdamW holds 52 parameters from before meshtrain.parallelize (transformer.wte.weight), which "
        "nothing uses now; call meshtrain.rebind(optimizer) after it"
    )


def make_between() -> str:
    """Step with an optimizer built between forward and backward, and with one built afterwards."""
    plan = {"mesh": {"dp_shard": 2}, "shard": {"reshard_after_forward": "never"}}
    model = meshtrain.parallelize(stock_model("gpt2-tied"), plan)
    loss = model(**padded_batches()[0]).loss
    optimizer = AdamW(model.parameters())
    loss.backward()
    with pytest.raises(ModelError) as error:
        optimizer.step()
    AdamW(model.parameters()).step()
    return str(error.value)


def test_optimizer_of_gathered_parameters_fails_at_its_first_step() -> None:
    for message in run_on_ranks(2, make_between):
        assert re.search(
            r"this AdamW was made between a forward pass and its backward pass, and holds \d+ temporary, "
            r"gathered parameters, .*; make it before the forward pass, or after the backward pass",
            message,
        )


def half_scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


def carry_gradients(mesh: dict[str, int]) -> None:
    """Add to gradients from before `parallelize`, or bring different ones on each rank."""
    stock, model = stock_model("gpt2-tied"), stock_model("gpt2-tied")
    first, second, *_ = padded_batches()
    for each in (stock, model):
        each(**first).loss.backward()
    parallel_model = parallel(model, mesh)
    stock(**second).loss.backward()
    part = own_part(parallel_model, second)
    if "pp" in mesh:
        parallel_model.forward_backward(part)
    else:
        parallel_model(**part).loss.backward()
    found = {name: full_tensor(p.grad) for name, p in pipeline_of(parallel_model).owned_parameters().items()}
    wanted = {name: parameter.grad for name, parameter in stock.named_parameters()}
    whole = join_parts(found, pipeline_of(parallel_model).fused)
    assert whole
    assert_equal(whole, wanted)
    rank = torch.distributed.get_rank()
    alone = stock_model("gpt2-tied")
    alone(**padded_batches()[rank]).loss.backward()
    with pytest.raises(ModelError, match=r"ranks 0 and 1 pass models that differ .* gradient .* remove gradients"):
        parallel(alone, mesh)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}, {"pp": 2}], ids=str)
def test_gradients_from_before_parallelize_are_kept(mesh: dict[str, int]) -> None:
    run_on_ranks(2, carry_gradients, mesh)


def bind_after() -> None:
    model = parallel(stock_model("gpt2-tied"), {"tp": 2})
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    meshtrain.rebind(optimizer)
    held = optimizer.param_groups[0]["params"]
    assert any(isinstance(parameter, LocalParameter) for parameter in held)
    losses = train(model, optimizer, padded_batches(), lambda batch: batch)
    for call, advice in (
        (lambda: torch.nn.utils.clip_grad_norm_(held, 1.0), "meshtrain.clip_grad_norm(model, max_norm)"),
        (lambda: half_scaler().unscale_(optimizer), "sharded_grad_scaler.ShardedGradScaler, and call its unscale_"),
    ):
        with pytest.raises(ModelError) as refused:
            call()
        assert advice in str(refused.value)
    # An optimizer that works element by element may hold local parts.
    torch.nn.utils.clip_grad_value_(held, 1.0)
    want, _ = expected("gpt2-tied", lambda model: AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    assert losses == pytest.approx(want, rel=1e-12, abs=0)
    # An optimizer that works on full matrices keeps the DTensors.
    factored = Adafactor(model.parameters())
    meshtrain.rebind(factored)
    assert factored.param_groups[0]["params"] == [*model.parameters()]
    strange = SGD(stock_model("gpt2-tied").parameters(), lr=1.0)
    with pytest.raises(ModelError, match="this SGD holds 52 parameters, and none of a parallel model"):
        meshtrain.rebind(strange)


def test_optimizer_built_after_parallelize_works_on_local_parts() -> None:
    run_on_ranks(2, bind_after)


def bind_late(mesh: dict[str, int]) -> None:
    """Build an optimizer after `parallelize`, and rebind it when it already has DTensor state."""
    for optimize, steps in ((adagrad, 0), (make_adam, 1), (momentum, 2)):
        model = parallel(stock_model("gpt2-tied"), mesh)
        optimizer = optimize(model)
        batches, part = padded_batches(), partial(own_part, model)
        losses = train(model, optimizer, batches[:steps], part)
        meshtrain.rebind(optimizer)
        losses += train(model, optimizer, batches[steps:], part)
        want, _ = expected("gpt2-tied", optimize)
        assert losses == pytest.approx(want, rel=1e-12, abs=0)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_optimizer_with_dtensor_state_continues(mesh: dict[str, int]) -> None:
    run_on_ranks(2, bind_late, mesh)


def rebind_with_odd_state() -> str:
    model = stock_model("gpt2-tied")
    optimizer = SGD(model.parameters(), lr=1.0)
    optimizer.state[model.lm_head.weight]["rows"] = torch.zeros(model.config.vocab_size)
    parallel(model, {"tp": 2})
    with pytest.raises(ModelError) as error:
        meshtrain.rebind(optimizer)
    return str(error.value)


def test_state_that_cannot_be_sharded_like_its_parameter_is_refused() -> None:
    assert run_on_ranks(2, rebind_with_odd_state)[0] == (
        "the optimizer has 'rows' of transformer.wte.weight in the shape (98,), which cannot be cut as the "
        "parameter is ((98, 32)); make the optimizer after meshtrain.parallelize"
    )
