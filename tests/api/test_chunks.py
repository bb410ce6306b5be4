"""In a program, `loss.chunk_tokens` gives the loss of the class without logits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshtrain.errors import ModelError
from meshtrain.models.tiny import default_config, shrink
from tests.api.programs import (
    full_parameters,
    make_adam,
    own_part,
    padded_batches,
    parallel,
    stock_model,
    train,
)
from tests.api.test_parallelize import assert_equal, train_stock
from tests.casts import lift_float32_casts
from tests.ranks import run_on_ranks

IN_5 = {"loss": {"chunk_tokens": 5}}
Case = tuple[str, dict[str, int], dict[str, Any]]
CASES: dict[int, list[Case]] = {
    1: [("gpt2-tied", {}, {}), ("qwen3", {}, {"recompute": {"mode": "full"}})],
    2: [
        ("gpt2-odd", {"tp": 2}, {}),
        ("llama-tied", {"tp": 2}, {"tensor": {"sequence_parallel": True}}),
        ("qwen3", {"dp_shard": 2}, {}),
        ("llama-untied", {"dp_replicate": 2}, {}),
        ("gpt2-tied", {"pp": 2}, {}),
    ],
}


def run_programs(cases: list[Case]) -> list[tuple[list[float], dict[str, Tensor]]]:
    answers = []
    for name, mesh, tables in cases:
        model = parallel(stock_model(name), mesh, **IN_5, **tables)
        losses = train(model, make_adam(model), padded_batches(), lambda batch, model=model: own_part(model, batch))
        answers.append((losses, full_parameters(model)))
    return answers


@pytest.mark.parametrize("world_size", CASES)
def test_stock_loop_computes_the_same_with_chunks(world_size: int) -> None:
    cases = CASES[world_size]
    (wanted,) = run_on_ranks(1, train_stock, [name for name, _, _ in cases])
    for answers in run_on_ranks(world_size, run_programs, cases):
        for (losses, parameters), (stock_losses, stock_parameters) in zip(answers, wanted, strict=True):
            assert losses == pytest.approx(stock_losses, rel=1e-12)
            assert_equal(parameters, stock_parameters)


def widths_of_head(model: Any, **inputs: Any) -> tuple[Any, list[int]]:
    """Return the output of a call, and the tokens of each call of its head."""
    tokens: list[int] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, args, output: tokens.append(output.shape[:-1].numel()))
    output = model(**inputs)
    handle.remove()
    return output, tokens


def use_once() -> None:
    batch = padded_batches()[1]
    stock, model = stock_model("llama-untied"), parallel(stock_model("llama-untied"), {}, **IN_5)
    wanted = stock(**batch, output_hidden_states=True)
    output, tokens = widths_of_head(model, **batch, output_hidden_states=True)
    # One token whose logits are not used, and 96 tokens.
    assert tokens == [1, *[5] * 19, 1]
    assert output.logits is None
    assert torch.equal(output.loss, wanted.loss) or abs(output.loss / wanted.loss - 1) < 1e-12
    assert len(output.hidden_states) == 5
    assert torch.equal(output.hidden_states[-1], wanted.hidden_states[-1])
    # Gradients may be taken again.
    for _ in range(2):
        model.zero_grad()
        output.loss.backward(retain_graph=True)
        gradient = model.lm_head.weight.grad
    wanted.loss.backward()
    assert_equal({"head": gradient}, {"head": stock.lm_head.weight.grad})

    counted = model(**batch, num_items_in_batch=7).loss
    assert counted.item() == pytest.approx(stock(**batch, num_items_in_batch=7).loss.item(), rel=1e-12)
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    assert model(**batch, shift_labels=shifted).loss.item() == pytest.approx(wanted.loss.item(), rel=1e-12)
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(wanted.loss.item(), rel=1e-12)
        assert model(**{**batch, "labels": torch.full_like(shifted, -100)}).loss == 0.0

    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(model(**inputs).logits, stock(**inputs).logits)
    text = batch["input_ids"][:1, :4]
    assert torch.equal(
        model.eval().generate(text, max_new_tokens=4, do_sample=False),
        stock.eval().generate(text, max_new_tokens=4, do_sample=False),
    )
    with pytest.raises(ModelError, match=r"return_dict = False with loss\.chunk_tokens: without logits, a tuple"):
        model(**batch, return_dict=False)
    # Nothing is left over from a call that has failed.
    assert torch.equal(model(**inputs).logits, stock(**inputs).logits)


def test_a_call_with_labels_returns_no_logits_and_others_do() -> None:
    run_on_ranks(1, use_once)


def without_asking() -> None:
    model, batch = parallel(stock_model("llama-untied"), {}), padded_batches()[0]
    assert "_WithChunks" not in (kind.__name__ for kind in type(model).__mro__)
    assert type(model.model).__module__.startswith("transformers")
    assert torch.equal(model(**batch).logits, stock_model("llama-untied")(**batch).logits)


def test_a_program_that_does_not_ask_gets_logits_from_an_unchanged_model() -> None:
    run_on_ranks(1, without_asking)


def no_labels_on_one_rank() -> float:
    model, batch = parallel(stock_model("llama-tied"), {"dp_replicate": 2}, **IN_5), padded_batches()[0]
    batch["labels"][4:] = -100
    loss = model(**own_part(model, batch)).loss
    loss.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    return float(loss.item())


def test_a_data_rank_may_have_no_label() -> None:
    found = run_on_ranks(2, no_labels_on_one_rank)
    assert found[0] == found[1] > 0


def of_type(kind: str, **values: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = shrink(default_config(kind), 2)
    config.update(values)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().train()
    lift_float32_casts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def train_with_router_loss() -> None:
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    # Imports the module of the class, whose casts are lifted then.
    of_type("mixtral")
    values = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    stock, model = of_type("mixtral", **values), parallel(of_type("mixtral", **values), {}, **IN_5)
    wanted, output = stock(**batch), model(**batch)
    assert output.aux_loss.item() == pytest.approx(wanted.aux_loss.item(), rel=1e-12)
    assert output.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-12)
    output.loss.backward()
    wanted.loss.backward()
    gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}
    # The fused projections of the experts are kept in parts, under other names or with other sizes.
    found = {
        name: it.grad
        for name, it in model.named_parameters()
        if name in gradients and it.shape == gradients[name].shape
    }
    first = "model.layers.0.mlp"
    assert found.keys() >= {"lm_head.weight", f"{first}.gate.weight", f"{first}.experts.down_proj"}
    assert_equal(found, gradients)


def test_the_class_adds_the_loss_of_its_routers() -> None:
    run_on_ranks(1, train_with_router_loss)


def refused(model: PreTrainedModel) -> str:
    with pytest.raises(ModelError) as caught:
        parallel(model, {}, **IN_5)
    return str(caught.value)


def ask_for_the_impossible() -> None:
    assert refused(of_type("bart")) == (
        "the head of a BartForCausalLM cannot run in chunks: it computes its loss itself, or from more than the hidden "
        "states of a token; set loss.chunk_tokens = 0"
    )
    assert refused(of_type("prophetnet", num_encoder_layers=2)) == (
        "a ProphetNetForCausalLM computes its loss itself, not by the loss function of transformers; set "
        "loss.chunk_tokens = 0"
    )
    model = stock_model("gpt2-tied")
    model.loss_function = lambda logits, labels, **kwargs: logits.mean()
    assert refused(model) == (
        "the head of a GPT2LMHeadModel cannot run in chunks: the program has set model.loss_function; set "
        "loss.chunk_tokens = 0"
    )


def count_calls_of_hooks() -> None:
    model, batch, seen = parallel(stock_model("gpt2-tied"), {}, **IN_5), padded_batches()[0], []
    model.lm_head.weight.register_hook(lambda gradient: seen.append("gradient"))
    model.transformer.register_forward_hook(lambda _, args, output: seen.append(tuple(output[0].shape[:2])))
    model(**batch).loss.backward()
    assert seen == [(8, 8), "gradient"]


def test_hooks_of_a_program_see_the_base_model_and_gradients_once() -> None:
    run_on_ranks(1, count_calls_of_hooks)


def train_parts() -> None:
    """Freeze the head, and then everything but the head, between calls."""
    batch = padded_batches()[0]
    stock, model = stock_model("llama-untied"), parallel(stock_model("llama-untied"), {}, **IN_5)
    for trained in ("model.", "lm_head.", ""):
        for it in (stock, model):
            it.zero_grad()
            for name, parameter in it.named_parameters():
                parameter.requires_grad_(name.startswith(trained))
            it(**batch).loss.backward()
        for name, parameter in model.named_parameters():
            gradient = stock.get_parameter(name).grad
            assert (parameter.grad is None) == (gradient is None) == (not name.startswith(trained))
            if gradient is not None:
                assert_equal({name: parameter.grad}, {name: gradient})


def test_head_and_base_model_may_be_frozen_between_calls() -> None:
    run_on_ranks(1, train_parts)


def test_a_loss_that_does_not_come_from_logits_of_tokens_is_refused() -> None:
    run_on_ranks(1, ask_for_the_impossible)
