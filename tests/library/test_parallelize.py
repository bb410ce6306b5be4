"""A user's own program: the stock loop around a parallel model computes what it computes around the stock one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import meshtrain
from meshtrain.parallel import replicas
from tests.library.programs import (
    expected,
    make_adam,
    own_part,
    padded_batches,
    parallel,
    stock_model,
    train,
    whole_parameters,
)
from tests.ranks import run_on_ranks

SP = {"tensor": {"sequence_parallel": True}}
Case = tuple[str, dict[str, int], dict[str, Any]]
CASES: dict[int, list[Case]] = {
    1: [("gpt2-tied", {}, {}), ("qwen3", {}, {})],
    2: [
        ("gpt2-odd", {"tp": 2}, {}),
        ("llama-tied", {"tp": 2}, SP),
        ("qwen3", {"dp_shard": 2}, {}),
        ("llama-untied", {"dp_replicate": 2}, {}),
        ("gpt2-tied", {"pp": 2}, {}),
    ],
    4: [
        ("gpt2-odd", {"tp": 4}, {}),
        ("qwen3", {"dp_shard": 2, "tp": 2}, SP),
        ("qwen3", {"dp_replicate": 2, "tp": 2}, {}),
        ("llama-tied", {"dp_replicate": 2, "dp_shard": 2}, {}),
        ("gpt2-tied", {"pp": 2, "tp": 2}, {}),
        ("llama-tied", {"pp": 2, "dp_shard": 2}, {"pipeline": {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}}),
    ],
}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in found.items():
        scale = wanted[name].abs().max().item()
        assert (value - wanted[name]).abs().max().item() <= 1e-12 * scale, name


def run_programs(cases: list[Case]) -> list[tuple[list[float], dict[str, Tensor]]]:
    replicas.LARGE = 64
    answers = []
    for name, mesh, tables in cases:
        stock = stock_model(name)
        optimizer = make_adam(stock)
        model = parallel(stock, mesh, **tables)
        meshtrain.rebind(optimizer)
        losses = train(model, optimizer, padded_batches(), lambda batch, model=model: own_part(model, batch))
        answers.append((losses, whole_parameters(model)))
    return answers


def train_stock(names: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [expected(name) for name in names]


@pytest.mark.parametrize("world_size", CASES)
def test_the_stock_loop_computes_the_same_on_every_mesh(world_size: int) -> None:
    cases = CASES[world_size]
    wanted = run_on_ranks(1, train_stock, [name for name, _, _ in cases])[0]
    answers = run_on_ranks(world_size, run_programs, cases)
    for number, (losses, parameters) in enumerate(wanted):
        found: dict[str, Tensor] = {}
        for rank in answers:
            assert rank[number][0] == pytest.approx(losses, rel=1e-12, abs=0), cases[number]
            assert_equal(rank[number][1], parameters)
            found |= rank[number][1]
        assert found.keys() == parameters.keys()


def look_at_outputs(mesh: dict[str, int]) -> None:
    """Whole logits, every field of the output and every gradient, right after `backward`."""
    stock, model = stock_model("gpt2-odd"), parallel(stock_model("gpt2-odd"), mesh)
    batch = padded_batches()[0]
    wanted = stock(**batch, output_hidden_states=True)
    part = own_part(model, batch)
    found = model(**part, output_hidden_states=True)
    rows = slice(0, len(batch["input_ids"])) if "tp" in mesh else None
    assert found.logits.shape == (len(part["input_ids"]), *wanted.logits.shape[1:])
    if rows:
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.hidden_states[2], wanted.hidden_states[2], rtol=0, atol=1e-12)
    # A loss of the user's own, of logits alone, in two backward passes.
    for output in (wanted, found):
        output.loss.backward()
    again = model(part["input_ids"]).logits.square().sum()
    again.backward()
    stock(batch["input_ids"]).logits.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}
    for name, parameter in model.named_parameters():
        whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        if name in gradients:
            assert_equal({name: whole}, gradients)
    stock.zero_grad()
    model.zero_grad()
    # Two forward passes, one backward pass.
    (stock(**batch).loss + 2 * stock(**padded_batches()[1]).loss).backward()
    (model(**part).loss + 2 * model(**own_part(model, padded_batches()[1])).loss).backward()
    norm = meshtrain.clip_grad_norm(model, 0.1)
    want = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.1)
    assert norm.item() == pytest.approx(want.item(), rel=1e-12)
    gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}
    for name, parameter in model.named_parameters():
        whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        if name in gradients:
            assert_equal({name: whole}, gradients)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_replicate": 2}, {"dp_shard": 2}], ids=str)
def test_outputs_and_gradients_are_those_of_the_stock_model_after_every_backward_pass(mesh: dict[str, int]) -> None:
    run_on_ranks(2, look_at_outputs, mesh)
