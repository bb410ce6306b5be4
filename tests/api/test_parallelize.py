"""The stock training loop computes the same around a parallel model as around the stock model."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import meshtrain
from meshtrain.parallel import replicas
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
from tests.ranks import run_on_ranks

SP = {"tensor": {"sequence_parallel": True}}
Case = tuple[str, dict[str, int], dict[str, Any]]
CASES: dict[int, list[Case]] = {
    1: [("gpt2-tied", {}, {}), ("qwen3", {}, {})],
    2: [
        ("gpt2-odd", {"tp": 2}, {}),
        ("llama-tied", {"tp": 2}, SP),
        ("qwen3", {"dp_shard": 2}, {}),
        ("llama-tied", {"dp_shard": 2}, {"shard": {"level": 2, "prefetch": 1}}),
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
        answers.append((losses, full_parameters(model)))
    return answers


def train_stock(names: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [expected(name) for name in names]


@pytest.mark.parametrize("world_size", CASES)
def test_stock_loop_computes_the_same_on_every_mesh(world_size: int) -> None:
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
    """Compare full logits, every output field and every gradient, directly after `backward`."""
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
    # A custom loss of the logits alone, in two backward passes.
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
def test_outputs_and_gradients_equal_the_stock_model_after_every_backward_pass(mesh: dict[str, int]) -> None:
    run_on_ranks(2, look_at_outputs, mesh)


def own_loop(model: Any, optimizer: Any, part: Any) -> list[float]:
    """Accumulate over new widths, evaluate, freeze, unfreeze, clip; return all numbers."""
    is_stock = isinstance(model, PreTrainedModel)
    numbers = []
    for step, batch in enumerate(padded_batches((8, 12, 6, 10, 8, 14))):
        if step % 2 == 0:
            optimizer.zero_grad()
        if step in (2, 4):
            for name, parameter in model.named_parameters():
                # A tied weight is frozen by the one name that the stock model has for it.
                if "embed_tokens" in name or "layers.0." in name:
                    parameter.requires_grad_(step == 4)
        # One data rank has no trained token.
        batch["labels"][:4] = -100
        loss = model(**batch).loss if is_stock else model.forward_backward(part(batch))
        if is_stock:
            loss.backward()
        numbers.append(loss.item())
        model.eval()
        with torch.no_grad():
            numbers.append((model(**batch).loss if is_stock else model.evaluate(part(batch))).item())
        model.train()
        if step % 2:
            clip = torch.nn.utils.clip_grad_norm_ if is_stock else meshtrain.clip_grad_norm
            numbers.append(clip(model.parameters() if is_stock else model, 0.3).item())
            optimizer.step()
    return numbers


def run_own_loops(cases: list[Case]) -> None:
    replicas.LARGE = 64
    for name, mesh, tables in cases:
        results = []
        for is_parallel in (False, True):
            stock = model = stock_model(name)
            optimizer = make_adam(model)
            # The optimizer already has state.
            train(model, optimizer, padded_batches()[:1], lambda batch: batch)
            optimizer.zero_grad()
            if is_parallel:
                model = parallel(stock, mesh, **tables)
                meshtrain.rebind(optimizer)
            numbers = own_loop(model, optimizer, lambda batch, model=model: own_part(model, batch))
            results.append((numbers, full_parameters(model) if is_parallel else dict(stock.named_parameters())))
        (wanted, parameters), (found, others) = results
        assert found == pytest.approx(wanted, rel=1e-12, abs=0), (name, mesh)
        assert_equal(others, {key: value.detach() for key, value in parameters.items()})


V_SHAPED = {"pipeline": {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}}


@pytest.mark.parametrize(
    "cases",
    [
        [("llama-tied", {"pp": 2}, {}), ("llama-tied", {"pp": 2}, V_SHAPED)],
        [
            ("llama-tied", {"pp": 2, "dp_replicate": 2}, {}),
            ("llama-tied", {"pp": 2, "dp_shard": 2}, {}),
            ("llama-tied", {"pp": 2, "dp_shard": 2}, {"shard": {"level": 2}}),
        ],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_custom_loop_computes_the_same_over_a_pipeline(cases: list[Case]) -> None:
    run_on_ranks(2 * len(cases[0][1]), run_own_loops, cases)


def drop_over_a_pipeline() -> list[float]:
    """Train twice with dropout while each rank draws numbers of its own; return the losses."""
    losses = []
    for _ in range(2):
        stock = stock_model("gpt2-tied")
        for module in stock.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        model = meshtrain.parallelize(stock, {"mesh": {"pp": 2}}, seed=3)
        torch.manual_seed(torch.distributed.get_rank())
        for batch in 2 * padded_batches()[:1]:
            torch.rand(1 + torch.distributed.get_rank())
            before = torch.get_rng_state()
            losses.append(model.forward_backward(batch).item())
            assert torch.equal(torch.get_rng_state(), before)
    return losses


def test_dropout_over_a_pipeline_depends_on_seed_and_step_alone() -> None:
    (losses, others) = run_on_ranks(2, drop_over_a_pipeline)
    assert losses == others
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]
