"""Over cp a program passes full sequences and gets what the stock model returns."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    DynamicCache,
    GPT2LMHeadModel,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from meshtrain.api.handle import pipeline_of
from meshtrain.errors import DataError, ModelError, PlanError
from meshtrain.models.fused import join_parts
from meshtrain.models.tiny import default_config, shrink
from meshtrain.parallel.pipeline import full_tensor
from tests.api.programs import Batch, full_parameters, make_adam, own_part, parallel, stock_model, train
from tests.api.test_parallelize import assert_equal
from tests.casts import lift_float32_casts
from tests.parity import VOCABULARY
from tests.ranks import run_on_ranks

ROWS = 4
GATHERED, CONTIGUOUS = ({"context": {"method": "all_gather", "order": order}} for order in ("head_tail", "contiguous"))
SP = {"tensor": {"sequence_parallel": True}}
Case = tuple[str, dict[str, int], dict[str, Any]]
CASES: dict[int, list[Case]] = {
    2: [
        ("gpt2-tied", {"cp": 2}, {}),
        ("llama-tied", {"cp": 2}, GATHERED),
        ("qwen3", {"cp": 2}, {"recompute": {"mode": "full"}, **CONTIGUOUS}),
        ("llama-untied", {"cp": 2}, {"loss": {"chunk_tokens": 5}}),
        ("llama-untied", {"cp": 2}, {"compile": {"enabled": True, "backend": "aot_eager"}}),
    ],
    4: [
        ("llama-tied", {"cp": 2, "tp": 2}, SP | GATHERED),
        ("gpt2-odd", {"cp": 2, "tp": 2}, {"loss": {"chunk_tokens": 5}}),
        ("qwen3", {"cp": 2, "dp_shard": 2}, GATHERED),
        ("gpt2-tied", {"cp": 2, "dp_replicate": 2}, {"recompute": {"mode": "selective"}}),
        ("gpt2-tied", {"pp": 2, "cp": 2}, {}),
        ("llama-tied", {"pp": 2, "cp": 2}, GATHERED),
        ("llama-tied", {"cp": 4}, {}),
    ],
}


def batches(*, types: bool = False) -> list[Batch]:
    """Return rows without padding, with padding on both sides, and with several documents.

    Args:
        types: whether the tokens of the first have types, which not every class takes.
    """
    generator = torch.Generator().manual_seed(1)
    found = []
    for width in (8, 16, 24):
        ids = torch.randint(3, VOCABULARY, (ROWS, width), generator=generator)
        found.append({"input_ids": ids, "labels": ids.clone()})
    mask = torch.ones(ROWS, 16, dtype=torch.long)
    mask[1, 9:] = mask[2, :3] = 0
    found[1] |= {"attention_mask": mask, "labels": found[1]["labels"].masked_fill(mask == 0, -100)}
    if types:
        found[0]["token_type_ids"] = ids[:, :8] % 7
    found[2]["position_ids"] = torch.cat([torch.arange(10), torch.arange(14)]).expand(ROWS, -1)
    return found


def without_cache(model: Any) -> Any:
    """Make documents of one row not see each other, as in the stock model without a cache."""
    model.config.use_cache = False
    return model


def run_programs(cases: list[Case]) -> list[tuple[list[float], dict[str, Tensor]]]:
    answers = []
    for name, mesh, tables in cases:
        model = parallel(without_cache(stock_model(name)), mesh, **tables)
        own = partial(own_part, model)
        losses = train(model, make_adam(model), batches(types="gpt2" in name and "pp" not in mesh), own)
        answers.append((losses, full_parameters(model)))
    return answers


def train_stock(cases: list[Case]) -> list[tuple[list[float], dict[str, Tensor]]]:
    answers = []
    for name, mesh, _ in cases:
        model = without_cache(stock_model(name))
        losses = train(model, make_adam(model), batches(types="gpt2" in name and "pp" not in mesh), lambda batch: batch)
        answers.append((losses, {key: value.detach() for key, value in model.named_parameters()}))
    return answers


@pytest.mark.parametrize("world_size", CASES)
def test_stock_loop_computes_the_same_over_cp(world_size: int) -> None:
    cases = CASES[world_size]
    (wanted,) = run_on_ranks(1, train_stock, cases)
    for answers in run_on_ranks(world_size, run_programs, cases):
        for case, (losses, parameters), (stock_losses, stock_parameters) in zip(cases, answers, wanted, strict=True):
            assert losses == pytest.approx(stock_losses, rel=1e-12), case
            assert_equal(parameters, stock_parameters)


def of_type(kind: str, **values: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = shrink(default_config(kind), 2)
    config.update({"vocab_size": VOCABULARY, **values})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().train()
    # Its module is imported now.
    lift_float32_casts()
    return model


def assert_same_gradients(model: Any, stock: Any) -> None:
    wanted = {name: it.grad for name, it in stock.named_parameters()}
    scale = max(float(it.abs().max()) for it in wanted.values())
    found = {name: full_tensor(it.grad) for name, it in model.named_parameters()}
    for name, gradient in join_parts(found, pipeline_of(model).fused).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-12 * scale)


def use_outputs(mesh: dict[str, int], tables: dict[str, Any]) -> None:
    stock, model = (without_cache(stock_model("gpt2-odd")) for _ in range(2))
    model = parallel(model, mesh, **tables)
    plain, padded, documents = batches()
    # With a mask, positions that do not go on by one do not begin documents.
    positions = {"position_ids": (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)}
    for batch in (plain, padded, padded | positions, documents):
        inputs = {**batch, "output_hidden_states": True}
        for given in (inputs, {**inputs, "num_items_in_batch": torch.tensor(7)}):
            wanted, found = stock(**given), model(**given)
            torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-12)
        for one, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        assert found.past_key_values is None
    # Losses of logits and hidden states alone, and two forward passes of one backward pass, with a
    # generation between.
    for it in (stock, model):
        first, second = it(plain["input_ids"], output_hidden_states=True), it(**documents)
        text = it.eval().generate(plain["input_ids"][:1, :5], max_new_tokens=3, do_sample=False)
        it.train()
        own = first.logits.square().mean() + first.hidden_states[1].square().mean()
        (own + 2 * second.loss + second.logits[:, 3].mean()).backward()
        with torch.no_grad():
            embeds = it.get_input_embeddings().weight if it is stock else stock.get_input_embeddings().weight
            logits = it(inputs_embeds=embeds[plain["input_ids"]]).logits
            torch.testing.assert_close(logits, it(**plain).logits, rtol=0, atol=1e-12)
        if it is stock:
            wanted_text = text
    assert torch.equal(text, wanted_text)
    assert_same_gradients(model, stock)


@pytest.mark.parametrize(
    "tables", [{}, {"recompute": {"mode": "full"}, **GATHERED}], ids=["ulysses", "all_gather, recomputed"]
)
def test_outputs_and_gradients_are_those_of_the_stock_model(tables: dict[str, Any]) -> None:
    run_on_ranks(2, use_outputs, {"cp": 2}, tables)


def routers(mesh: dict[str, int], tables: dict[str, Any]) -> None:
    """Compare the loss with the auxiliary loss of routers, which is not a sum over tokens."""
    values = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    stock, model = (of_type("mixtral", **values) for _ in range(2))
    model = parallel(model, mesh, **tables)
    for batch in batches()[:2]:
        wanted, found = stock(**batch), model(**batch)
        torch.testing.assert_close(found.aux_loss, wanted.aux_loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-12, atol=0)
        assert [it.shape for it in found.router_logits] == [it.shape for it in wanted.router_logits]
        for it in (wanted, found):
            (it.loss + it.aux_loss).backward()
    assert_same_gradients(model, stock)


def test_the_loss_of_routers_is_that_of_full_sequences() -> None:
    run_on_ranks(2, routers, {"cp": 2}, {})
    run_on_ranks(2, routers, {"cp": 2}, {"recompute": {"mode": "full"}, **GATHERED})


def long_rotary() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    stock, model = (of_type("llama", rope_parameters=dict(rope), max_position_embeddings=8) for _ in range(2))
    model = parallel(model, {"cp": 2})
    for batch in batches():
        with torch.no_grad():
            torch.testing.assert_close(
                model(input_ids=batch["input_ids"]).logits,
                stock(input_ids=batch["input_ids"]).logits,
                rtol=0,
                atol=1e-12,
            )
        torch.testing.assert_close(model(**batch).loss, stock(**batch).loss, rtol=1e-12, atol=0)


def test_rotary_frequencies_follow_the_full_sequence() -> None:
    run_on_ranks(2, long_rotary)


def compare_masks(tables: dict[str, Any]) -> None:
    """Compare models whose masks need more than the order of tokens."""
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    # Chunks of four tokens begin behind padding, and a part has six.
    left[0, :3] = right[1, 5:] = 0
    positions = {"position_ids": torch.arange(2, 14).expand(2, -1)}
    both = {"is_causal": False}
    # GPT-2 embeds types, and its mask does not depend on them.
    typed = both | {"token_type_ids": left}
    chunked = partial(of_type, "llama4_text", attn_temperature_tuning=False)
    for build, inputs in (
        # Llama 4 ignores types.
        (chunked, [{"attention_mask": left, "token_type_ids": left}, {"attention_mask": right}, positions]),
        (partial(stock_model, "llama-tied"), [both, both | {"attention_mask": left}, both | {"attention_mask": right}]),
        (partial(stock_model, "gpt2-tied"), [typed, {"token_type_ids": left}]),
        # It passes `use_cache` on without naming it.
        (partial(of_type, "granitemoe"), [{}, {"attention_mask": right}]),
    ):
        stock, model = build().eval(), parallel(build(), {"cp": 2}, **tables).eval()
        for given in inputs:
            found, wanted = model(ids, **given), stock(ids, use_cache=False, **given).logits
            seen = given.get("attention_mask", torch.ones_like(ids)) == 1
            torch.testing.assert_close(found.logits[seen], wanted[seen], rtol=0, atol=1e-12)
            assert found.get("past_key_values") is None


@pytest.mark.parametrize("tables", [{}, GATHERED, CONTIGUOUS], ids=["ulysses", "gathered", "contiguous"])
def test_masks_are_those_of_full_sequences(tables: dict[str, Any]) -> None:
    run_on_ranks(2, compare_masks, tables)


def pass_types_that_make_a_mask() -> None:
    stock = of_type("hrm_text")
    model, ids = parallel(of_type("hrm_text"), {"cp": 2}), batches()[0]["input_ids"]
    torch.testing.assert_close(model(ids).logits, stock(ids, use_cache=False).logits, rtol=0, atol=1e-12)
    with pytest.raises(DataError) as caught:
        model(ids, token_type_ids=(ids > 10).long())
    assert str(caught.value) == (
        "token_type_ids cannot be divided over cp, because the model makes its mask of them; leave them out, or use a "
        "mesh with cp = 1"
    )


def test_types_of_tokens_that_make_a_mask_are_refused() -> None:
    run_on_ranks(2, pass_types_that_make_a_mask)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"logits_to_keep": 1},
        "logits_to_keep = 1 over cp: the tokens whose logits are asked for may be those of other processes; leave it "
        "out, or use a mesh with cp = 1",
    ),
    (
        {"output_attentions": True},
        "output_attentions = True over cp: a process has the attention of its own heads or tokens only; leave it out, "
        "or use a mesh with cp = 1",
    ),
    (
        {"return_dict": False},
        "return_dict = False over cp: what the parts return is joined in the fields of the output, and a tuple has "
        "none; leave it out, or use a mesh with cp = 1",
    ),
    (
        {"past_key_values": DynamicCache()},
        "past_key_values over cp: a process has the keys of its own part only, so there is no cache; leave it out, or "
        "use a mesh with cp = 1",
    ),
    (
        {"attention_mask": torch.ones(ROWS, 1, 8, 8)},
        "attention_mask is (4, 1, 8, 8), but cp divides sequences of (4, 8) tokens; pass one number for each token",
    ),
    (
        {"token_type_ids": torch.ones(8, dtype=torch.long)},
        "token_type_ids is (8,), but cp divides sequences of (4, 8) tokens; pass one number for each token",
    ),
    (
        {"encoder_hidden_states": torch.ones(ROWS, 8, 4)},
        "encoder_hidden_states cannot be divided over cp, which takes input_ids, inputs_embeds, token_type_ids, "
        "attention_mask, position_ids; leave it out, or use a mesh with cp = 1",
    ),
    ({"input_ids": None}, "there are no input_ids (rows, seq) to divide over cp; pass them"),
    (
        {"input_ids": torch.ones(8, dtype=torch.long)},
        "there are no input_ids (rows, seq) to divide over cp; pass them",
    ),
    (
        {"input_ids": torch.ones(ROWS, 7, dtype=torch.long), "labels": None},
        "mesh.cp = 2 divides each sequence into 2 equal parts, which is not possible for 7 tokens; pad the batch "
        "(pad_to_multiple_of = 2 of a tokenizer)",
    ),
]


class OwnLoss(GPT2LMHeadModel):
    """Computes its loss itself, from the logits that it has."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        output = super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **options)
        if labels is not None:
            output.loss = output.logits.square().mean()
        return output


def ask_for_the_impossible() -> None:
    model, batch = parallel(stock_model("gpt2-tied"), {"cp": 2}), batches()[0]
    for given, message in REFUSED:
        with pytest.raises((DataError, ModelError)) as caught:
            model(**{**batch, **given})
        assert str(caught.value) == message
    model.config.return_dict = False
    with pytest.raises(ModelError, match=r"^return_dict = False over cp: what the parts return is joined in"):
        model(**batch)
    model.config.return_dict = True
    model.loss_function = lambda logits, labels, **kwargs: logits.mean()
    with pytest.raises(ModelError, match=r"^model\.loss_function was set by the program, but over cp it would get the"):
        model(**batch)
    # Nothing is left over from a call that has failed.
    stock = stock_model("gpt2-tied")
    torch.testing.assert_close(model(batch["input_ids"]).logits, stock(batch["input_ids"]).logits, rtol=0, atol=1e-12)
    own = parallel(OwnLoss(stock_model("gpt2-tied").config), {"cp": 2})
    with pytest.raises(ModelError) as caught:
        own(**batch)
    assert str(caught.value) == (
        "OwnLoss computes its loss itself, not by the loss function of transformers, and over cp from the logits of "
        "a part; pass no labels and compute it from the logits that the call returns, or use a mesh with cp = 1"
    )
    with pytest.raises(PlanError) as refused:
        parallel(AutoModelForTokenClassification.from_config(stock.config), {"cp": 2})
    assert str(refused.value).startswith(
        "mesh.cp = 2: logits of parts cannot be joined, because the head of a GPT2ForTokenClassification cannot run in "
    )


SHARED = (
    "this model was built from the configuration of a parallel model, and would compute attention as that one does; "
    "build it from the configuration that the parallel model had before the call of meshtrain.parallelize"
)


def take_the_configuration() -> None:
    model, batch = parallel(stock_model("gpt2-tied"), {"cp": 2}), batches()[0]
    model(**batch)
    for mesh in ({"cp": 2}, {"tp": 2}):
        with pytest.raises(ModelError) as caught:
            parallel(GPT2LMHeadModel(model.config), mesh)
        assert str(caught.value) == SHARED
    with pytest.raises(ModelError) as caught:
        GPT2LMHeadModel(model.config)(**batch)
    assert str(caught.value) == SHARED
    # A program may copy a part of the model, which belongs to it.
    copied = copy.deepcopy(model.transformer.h[0].attn.attn_dropout)
    assert copied.stage_attention is model.transformer.h[0].attn.stage_attention


def test_a_configuration_that_a_parallel_model_has_is_refused() -> None:
    run_on_ranks(2, take_the_configuration)


def share_a_configuration(mesh: dict[str, int]) -> None:
    stock, batch = stock_model("gpt2-tied").eval(), batches()[0]
    name, wanted = stock.config._attn_implementation, stock(**batch).logits

    def twin(mesh: dict[str, int]) -> Any:
        model = GPT2LMHeadModel(stock.config).double().eval()
        model.load_state_dict(stock.state_dict())
        return parallel(model, mesh) if mesh else model

    reference, policy = twin(mesh), twin({"cp": 2})
    assert stock.config._attn_implementation == name
    for model in (policy, reference, stock):
        torch.testing.assert_close(model(**batch).logits, wanted, rtol=0, atol=1e-12)
    # The configuration serves a model that is built after these calls too.
    torch.testing.assert_close(twin({"cp": 2})(**batch).logits, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"cp": 2}], ids=["stock", "tp", "cp"])
def test_models_of_one_configuration_compute_attention_in_their_own_ways(mesh: dict[str, int]) -> None:
    run_on_ranks(2, share_a_configuration, mesh)


def test_calls_that_need_full_sequences_are_refused() -> None:
    run_on_ranks(2, ask_for_the_impossible)


def pass_the_impossible_to_a_pipeline() -> None:
    model, batch = parallel(stock_model("gpt2-tied"), {"pp": 2, "cp": 2}), batches()[0]
    with pytest.raises(DataError) as caught:
        model.forward_backward({name: value[:, :7] for name, value in batch.items()})
    assert str(caught.value) == REFUSED[-1][1]
    with pytest.raises(DataError) as caught:
        model.forward_backward({**batch, "token_type_ids": batch["labels"], "encoder_attention_mask": batch["labels"]})
    assert str(caught.value).startswith("encoder_attention_mask cannot be divided over cp, which takes")


def test_batches_of_a_pipeline_that_cannot_be_divided_are_refused() -> None:
    run_on_ranks(4, pass_the_impossible_to_a_pipeline)
