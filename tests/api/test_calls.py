"""Unusual calls of a parallel model compute what the stock model computes, or are refused."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from transformers import BartConfig, BartForCausalLM, GPT2Config, GPT2ForQuestionAnswering

import meshtrain
from meshtrain.api.handle import pipeline_of
from meshtrain.errors import DataError, ModelError
from meshtrain.parallel import replicas
from tests.api.programs import own_part, padded_batches, parallel, stock_model
from tests.api.test_parallelize import assert_equal
from tests.api.test_refusals import message_of
from tests.ranks import run_on_ranks

MESHES: list[dict[str, int]] = [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}]
FIRST, SECOND, THIRD, _ = padded_batches()
Program = Callable[[Any, Callable[[Any], Any]], None]


class Broken(torch.autograd.Function):
    """Fails in the backward pass."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        raise ValueError("broken")


def break_in_layer(model: Any, layer: int) -> Any:
    return model.transformer.h[layer].register_forward_hook(lambda _, __, output: Broken.apply(output))


def without_count(model: Any, part: Callable[[Any], Any]) -> None:
    model(**part(FIRST), num_items_in_batch=None).loss.backward()


def zero_gradients_before_backward(model: Any, part: Callable[[Any], Any]) -> None:
    model(**part(FIRST)).loss.backward()
    loss = model(**part(SECOND)).loss
    model.zero_grad()
    loss.backward()


def continue_after_an_exception(model: Any, part: Callable[[Any], Any]) -> None:
    model(**part(FIRST)).loss.backward()
    handle = break_in_layer(model, 1)
    with pytest.raises(ValueError, match="broken"):
        model(**part(SECOND)).loss.backward()
    handle.remove()
    model.zero_grad()
    for batch in (SECOND, THIRD):
        model(**part(batch)).loss.backward()


def pass_shifted_labels(model: Any, part: Callable[[Any], Any]) -> None:
    """Pass labels that are already shifted; their number differs between data ranks."""
    shifted = torch.cat([FIRST["labels"][:, 1:], torch.full_like(FIRST["labels"][:, :1], -100)], dim=1)
    shifted[:2, 3:] = -100
    model(**part(FIRST | {"shift_labels": shifted})).loss.backward()


def ignore_another_label(model: Any, part: Callable[[Any], Any]) -> None:
    labels = SECOND["input_ids"].masked_fill(SECOND["input_ids"] < 40, 0)
    model(**part(SECOND | {"labels": labels}), ignore_index=0).loss.backward()


def loss_of_hidden_states(model: Any, part: Callable[[Any], Any]) -> None:
    """Weight the positions of all hidden states: part of a sequence would give another loss."""
    batch = {name: value for name, value in part(FIRST).items() if name != "labels"}
    states = model(**batch, output_hidden_states=True).hidden_states
    weights = torch.linspace(0, 1, batch["input_ids"].shape[1], dtype=torch.float64)[None, :, None]
    sum((state.tanh() * weights).sum() for state in states).backward()


def call_the_head(model: Any, part: Callable[[Any], Any]) -> None:
    """Compute a loss with the head from hidden states, twice; its gradient arrives first."""
    for batch in map(part, (FIRST, SECOND)):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model.lm_head(model(**inputs, output_hidden_states=True).hidden_states[-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").backward()


def gradient_of_a_gradient(model: Any, part: Callable[[Any], Any]) -> None:
    """Penalize the change of the output with the embeddings."""
    embeddings = torch.randn(8, 6, 32, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    embeddings = part({"": embeddings})[""].requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        logits = model(inputs_embeds=embeddings).logits
        (change,) = torch.autograd.grad(logits.square().sum(), embeddings, create_graph=True)
        change.square().sum().backward()


def gradients_of(program: Program, mesh: dict[str, int], *, kind: str = "gpt2-tied", **tables: Any) -> None:
    stock, model = stock_model(kind), parallel(stock_model(kind), mesh, **tables)
    program(stock, lambda batch: batch)
    program(model, partial(own_part, model))
    wanted = {name: parameter.grad for name, parameter in stock.named_parameters()}
    found = {}
    for name, parameter in pipeline_of(model).owned_parameters().items():
        found[name] = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    mine = {name: value for name, value in found.items() if name in wanted}
    assert {name for name, value in mine.items() if value is None} <= {
        n for n, value in wanted.items() if value is None
    }
    assert_equal({name: value for name, value in mine.items() if value is not None}, wanted)


def habits(mesh: dict[str, int]) -> None:
    replicas.LARGE = 64
    for program in (without_count, zero_gradients_before_backward, continue_after_an_exception):
        gradients_of(program, mesh)
    gradients_of(without_count, mesh, recompute={"mode": "full"})
    for program in (pass_shifted_labels, ignore_another_label, loss_of_hidden_states):
        gradients_of(program, mesh)
    if "dp_shard" not in mesh:
        gradients_of(call_the_head, mesh, kind="llama-untied")
        gradients_of(gradient_of_a_gradient, mesh, kind="gpt2-odd")
    if "tp" in mesh:
        for program in (loss_of_hidden_states, call_the_head, gradient_of_a_gradient):
            gradients_of(program, mesh, kind="llama-untied", tensor={"sequence_parallel": True})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_of_unusual_training_loops_equal_those_of_the_stock_model(mesh: dict[str, int]) -> None:
    run_on_ranks(2, habits, mesh)


def pack(mesh: dict[str, int]) -> None:
    """Pack documents by restarting positions: separate where the stock call separates them."""
    batch = padded_batches()[1]
    ids = batch["input_ids"].clamp(min=3)
    packed = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids) % 5}
    losses = []
    for choice in ({}, {"use_cache": False}):
        wanted = stock_model("llama-untied")(**packed, **choice).loss
        for mode in ("none", "full"):
            model = parallel(stock_model("llama-untied"), mesh, recompute={"mode": mode})
            given = own_part(model, packed) | choice
            losses.append(model.forward_backward(given) if "pp" in mesh else model(**given).loss)
            torch.testing.assert_close(losses[-1], wanted, rtol=1e-12, atol=0)
        if "pp" not in mesh:
            embeddings = stock_model("llama-untied").get_input_embeddings()(ids).detach()
            given = own_part(model, packed | {"inputs_embeds": embeddings}) | choice
            given.pop("input_ids")
            torch.testing.assert_close(model(**given).loss, wanted, rtol=1e-12, atol=0)
    assert not torch.isclose(losses[0], losses[-1], rtol=1e-6)


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}, {"dp_shard": 2}], ids=str)
def test_packed_documents_are_separate_where_the_stock_model_separates_them(mesh: dict[str, int]) -> None:
    run_on_ranks(2, pack, mesh)


def misuse(mesh: dict[str, int]) -> dict[str, str]:
    model = parallel(stock_model("gpt2-tied"), mesh)
    batch = own_part(model, FIRST)
    inner = {name: value for name, value in batch.items() if name != "labels"}
    found = {"part": message_of(ModelError, lambda: model.transformer(**inner))}
    if "dp_shard" in mesh:
        with torch.inference_mode():
            found["inference mode"] = message_of(ModelError, lambda: model(**batch))
        found["head"] = message_of(ModelError, lambda: model.lm_head(torch.zeros(1, 1, 32, dtype=torch.float64)))
        found["embedding"] = message_of(ModelError, lambda: model.get_input_embeddings()(batch["input_ids"]))
    found |= differ_from_other_ranks(model, batch)
    if "dp_shard" in mesh:
        loss = model(**batch).loss
        found["twice"] = message_of(ModelError, lambda: loss.backward(create_graph=True))
    if "dp_replicate" in mesh:
        # Set what the forward pass of DDP sets. The constructor of DDP fails under
        # TORCH_DISTRIBUTED_DEBUG.
        DistributedDataParallel._active_ddp_module = model
        found["wrapped"] = message_of(ModelError, lambda: model(**batch))
        DistributedDataParallel._active_ddp_module = None
        hooked = stock_model("gpt2-tied")
        hooked.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)
        found["hooked"] = message_of(ModelError, lambda: parallel(hooked, mesh))
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        found["in the pass"] = message_of(ModelError, model(**batch).loss.backward)
        model.lm_head.weight._post_accumulate_grad_hooks.clear()
        found["gradient"] = message_of(
            ModelError, lambda: torch.autograd.grad(model(**batch).loss, [*model.parameters()])
        )
    if "tp" in mesh:
        is_split = parallel(stock_model("gpt2-tied"), mesh, tensor={"sequence_parallel": True})
        wishes = {"output_hidden_states": True, "return_dict": False}
        found["tuple of states"] = message_of(ModelError, lambda: is_split(**batch, **wishes))
        found["attentions"] = message_of(ModelError, lambda: model(**batch, output_attentions=True))
    else:
        found["tuple"] = message_of(ModelError, lambda: model(**batch, return_dict=False))
        answers = parallel(question_model(), mesh)
        spans = {"start_positions": torch.arange(len(batch["labels"])), "end_positions": batch["labels"].argmax(1)}
        found["spans"] = message_of(ModelError, lambda: answers(batch["input_ids"], **spans))
        model.loss_function = lambda logits, *_, **__: logits.square().mean()
        found["own loss"] = message_of(ModelError, lambda: model(**batch))
        del model._loss_function
    handle = break_in_layer(model, 1)
    losses = [model(**batch).loss, model(**batch).loss]
    handle.remove()
    with pytest.raises(ValueError, match="broken"):
        losses[0].backward()
    found["backward"] = message_of(ModelError, losses[1].backward)
    model.zero_grad()
    found |= cast_a_part(model, batch) if "dp_replicate" not in mesh else {}
    return found


def differ_from_other_ranks(model: Any, batch: dict[str, Tensor]) -> dict[str, str]:
    """Call the model differently on ranks 0 and 1."""
    rank, found = torch.distributed.get_rank(), {}
    without = {name: value for name, value in batch.items() if name != "labels"}
    if model.num_data_ranks == 1:
        with torch.no_grad():
            rolled = {name: value.roll(rank, 0) for name, value in batch.items()}
            found["shuffled"] = message_of(DataError, lambda: model(**rolled))
    else:
        found["labels"] = message_of(ModelError, lambda: model(**(without if rank else batch)))
    norm = model.transformer.ln_f.bias
    norm.requires_grad_(rank == 0)
    found["frozen"] = message_of(ModelError, lambda: model(**batch))
    norm.requires_grad_()
    return found


def question_model() -> Any:
    torch.manual_seed(0)
    return GPT2ForQuestionAnswering(GPT2Config(vocab_size=98, n_embd=32, n_layer=2, n_head=4, n_positions=64))


def shifted_at_home(mesh: dict[str, int]) -> None:
    """Compute the loss of BART's decoder, which shifts no labels, so every label must count."""
    torch.manual_seed(0)
    sizes = {"decoder_layers": 1, "d_model": 32, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
    stock = BartForCausalLM(BartConfig(vocab_size=98, max_position_embeddings=64, dropout=0.0, **sizes)).double()
    model = meshtrain.parallelize(copy.deepcopy(stock), {"mesh": mesh}, prove_unknown_class=False)
    batch = {"input_ids": FIRST["input_ids"], "labels": FIRST["labels"].clone()}
    batch["labels"][:4, 0] = -100
    torch.testing.assert_close(model(**own_part(model, batch)).loss, stock(**batch).loss, rtol=1e-12, atol=0)


def test_all_labels_count_if_the_model_does_not_shift_them() -> None:
    run_on_ranks(2, shifted_at_home, {"dp_replicate": 2})


def cast_a_part(model: Any, batch: dict[str, Tensor]) -> dict[str, str]:
    optimizer = SGD(model.parameters(), lr=0.1)
    meshtrain.rebind(optimizer)
    model.transformer.h.type(torch.float32)
    model.transformer.h.type(torch.float64)
    model(**batch).loss.backward()
    return {"cast": message_of(ModelError, optimizer.step)}


WANTED = {
    "head": r"the head of a model over dp_shard was called by itself, .*; call the model itself, with input_ids",
    "embedding": r"the embedding of a model over dp_shard was called by itself, .*; call the model itself, with input",
    "gradient": r"the gradient of transformer.wte.weight was read before it was summed over all ranks, by torch."
    r"autograd.grad or by a hook of the parameter; call loss.backward\(\), and read parameter.grad when it is done",
    "in the pass": r"the gradient of lm_head.weight was read before it was summed|the gradient of transformer",
    "twice": r"create_graph = True: gradients of gradients do not pass .*; use a mesh with dp_shard = 1",
    "wrapped": r"the model is wrapped in DistributedDataParallel, .*; leave it out, and use the dp axes of the mesh",
    "hooked": r"1 parameters have hooks on their gradients \(transformer.wte.weight\), .*; change parameter.grad after",
    "labels": r"rank \d calls the model with(out)? labels and trains 68 of 68 parameters, but another rank differs",
    "frozen": r"rank \d calls the model with labels and trains 6[78] of 68 parameters, but another rank differs",
    "shuffled": r"rank \d received a different batch from a rank that shares its model over tp, cp or pp",
    "tuple of states": r"return_dict = False with output_hidden_states = True: .*; leave return_dict out",
    "own loss": r"model.loss_function was set by the program: .*; compute it from the logits, divided by model",
    "part": r"a part of a parallel model was called by itself, .*; call the model itself, and use model\(...,",
    "inference mode": r"was called under torch.inference_mode\(\), .*; use torch.no_grad\(\)",
    "attentions": r"output_attentions = True: over tp every rank has .*; leave it out, or use a mesh with tp = 1",
    "tuple": r"return_dict = False: the loss is made the mean over all data ranks .*; leave it out",
    "spans": r"QuestionAnsweringModelOutput has a loss, but no labels were passed: .*; compute it from the logits",
    "backward": r"an earlier backward pass of this model has ended with an exception, .*; call optimizer.zero_grad\(\)",
    "cast": r"\d+ parameters of this SGD have left the memory that it was bound to, .*; do that before mesh",
}


def test_calls_with_silently_wrong_results_are_refused() -> None:
    told_of = set()
    for mesh in MESHES:
        for found in run_on_ranks(2, misuse, mesh):
            told_of |= found.keys()
            for what, message in found.items():
                assert re.search(WANTED[what], message), (what, message)
    assert told_of == WANTED.keys()


def draw_after_a_failure() -> None:
    model = parallel(stock_model("gpt2-tied"), {"tp": 2})
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with pytest.raises(IndexError):
        model(torch.full((1, 70), 3))  # the model has 64 positions
    assert torch.equal(torch.rand(3), wanted)
    stock = stock_model("gpt2-tied")
    torch.testing.assert_close(model(**FIRST).loss, stock(**FIRST).loss, rtol=1e-12, atol=0)


def look_between_the_passes() -> None:
    model = parallel(stock_model("llama-untied"), {"dp_shard": 2})
    loss = model(**own_part(model, FIRST)).loss
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    loss.backward()


def test_a_program_finds_its_own_parameters_between_the_passes() -> None:
    run_on_ranks(2, look_between_the_passes)


def test_failed_forward_pass_restores_the_random_generators() -> None:
    run_on_ranks(2, draw_after_a_failure)
