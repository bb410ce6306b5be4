"""Fused projections in parts compute the same and map to the stock names."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from meshtrain.errors import PlanError
from meshtrain.models.fused import FusedParameter, UnfusedProjection, unfuse
from tests.models.gpt2 import FUSED, GPT2

C_ATTN = {"transformer.h.*.attn.c_attn": ["q", "k", "v"]}
MIXTRAL = MixtralConfig(
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=4,
)
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
PHI3 = Phi3Config(
    vocab_size=13,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=16,
    pad_token_id=0,
)


def stock_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def problems(model: nn.Module, fused: dict) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        unfuse(model, fused)
    return caught.value.lines


def gradients(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=ids).logits
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_unfused_model_computes_the_same() -> None:
    stock = stock_gpt2()
    ours = copy.deepcopy(stock)
    entries = unfuse(ours, C_ATTN)
    ids = torch.arange(6).view(1, 6)
    expected, expected_gradients = gradients(stock, ids)
    found, found_gradients = gradients(ours, ids)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    for entry in entries:
        joined = torch.cat([found_gradients.pop(part) for part in entry.parts], entry.dim)
        assert torch.allclose(joined, expected_gradients[entry.name], rtol=0, atol=1e-12), entry.name
    assert found_gradients.keys() == expected_gradients.keys() - {entry.name for entry in entries}


def test_entries_map_to_the_stock_names_in_model_order() -> None:
    stock = stock_gpt2()
    ours = copy.deepcopy(stock)
    entries = unfuse(ours, C_ATTN)
    assert tuple(entries) == FUSED
    values, stock_values = dict(ours.named_parameters()), dict(stock.named_parameters())
    for entry in entries:
        assert torch.equal(torch.cat([values[part] for part in entry.parts], entry.dim), stock_values[entry.name])
    untouched = stock_values.keys() - {entry.name for entry in entries}
    assert values.keys() == untouched | {part for entry in entries for part in entry.parts}


def test_linear_projections_are_split_by_rows() -> None:
    torch.manual_seed(0)
    stock = Phi3ForCausalLM(PHI3).double().eval()
    ours = copy.deepcopy(stock)
    rules = {"model.layers.*.mlp.gate_up_proj": ["gate", "up"], "model.layers.*.self_attn.qkv_proj": ["q", "k", "v"]}
    entries = unfuse(ours, rules)
    assert {entry.dim for entry in entries} == {0}
    assert [len(entry.parts) for entry in entries] == [3, 2, 3, 2]
    ids = torch.arange(6).view(1, 6)
    with torch.no_grad():
        assert torch.allclose(ours(input_ids=ids).logits, stock(input_ids=ids).logits, rtol=0, atol=1e-14)


def test_parts_are_independent_modules() -> None:
    model = stock_gpt2()
    unfuse(model, C_ATTN)
    projection = model.transformer.h[0].attn.c_attn
    assert isinstance(projection, UnfusedProjection)
    called = []
    projection.q.register_forward_hook(lambda *_: called.append("q"))
    projection(torch.zeros(1, 2, GPT2.n_embd, dtype=torch.float64))
    assert called == ["q"]
    with torch.no_grad():
        before = projection.k.weight.clone()
        projection.q.weight.zero_()
    assert torch.equal(projection.k.weight, before)
    assert [part.nf for part in projection.children()] == [GPT2.n_embd] * 3
    assert all(isinstance(part, Conv1D) for part in projection.children())


def test_unfusing_on_meta_allocates_no_memory() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2)
    unfuse(model, C_ATTN)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_wrong_fused_rules_are_refused() -> None:
    assert problems(stock_gpt2(), {"transformer.h.*.attn.c_atn": ["q", "k", "v"]}) == (
        "tensor.fused: 'transformer.h.*.attn.c_atn' matches no module of the model; the nearest is "
        "'transformer.h.*.attn.c_attn'",
    )
    assert problems(stock_gpt2(), {"transformer.ln_f": ["a", "b"]}) == (
        "tensor.fused: transformer.ln_f is a LayerNorm, but only Linear and Conv1D have parts",
    )
    assert problems(stock_gpt2(), {"transformer.h.*.attn.c_attn": ["a", "b", "c", "d"]}) == (
        "tensor.fused: transformer.h.0.attn.c_attn has 30 outputs, which 4 equal parts do not divide",
    )


def test_unequal_parts_and_stacks_are_split_and_joined() -> None:
    torch.manual_seed(0)
    stock = torch.randn(16, 3)
    unequal = FusedParameter("qkv", ("q", "k", "v"), 0, sizes=(8, 4, 4))
    assert [part.shape[0] for part in unequal.split(stock).values()] == [8, 4, 4]
    assert torch.equal(unequal.join(list(unequal.split(stock).values())), stock)
    experts = torch.randn(2, 6, 5)
    stacked = FusedParameter("gate_up", ("gate_up",), 1, stacked=2)
    assert stacked.split(experts)["gate_up"].shape == (2, 2, 3, 5)
    assert torch.equal(stacked.join([stacked.split(experts)["gate_up"]]), experts)


def test_shares_are_taken_from_the_configuration() -> None:
    torch.manual_seed(0)
    config = Phi3Config(**{**PHI3.to_dict(), "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 1})
    stock = Phi3ForCausalLM(config).double().eval()
    ours = copy.deepcopy(stock)
    heads = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": 1}
    entry = unfuse(ours, {"model.layers.*.self_attn.qkv_proj": heads})[0]
    rows = config.hidden_size // 4
    assert entry.sizes == (4 * rows, rows, rows)
    ids = torch.arange(6).view(1, 6)
    with torch.no_grad():
        assert torch.allclose(ours(input_ids=ids).logits, stock(input_ids=ids).logits, rtol=0, atol=1e-14)
    assert problems(stock, {"model.layers.*.self_attn.qkv_proj": {"q": "num_heads", "k": 1}}) == (
        "tensor.fused: model.layers.0.self_attn.qkv_proj.q = 'num_heads' is not a number of the model's configuration",
    )
    assert problems(stock, {"model.layers.*.self_attn.qkv_proj": {"q": 4, "k": 7}}) == (
        f"tensor.fused: model.layers.0.self_attn.qkv_proj has {6 * rows} outputs, which the shares [4, 7] do not "
        "divide",
    )


def test_stacked_experts_compute_the_same() -> None:
    torch.manual_seed(0)
    stock = MixtralForCausalLM(MIXTRAL).eval()
    ours = copy.deepcopy(stock)
    (first, *_) = unfuse(ours, {"model.layers.*.mlp.experts.gate_up_proj": ["gate", "up"]})
    assert first == FusedParameter(GATE_UP, (GATE_UP,), 1, stacked=2)
    assert ours.get_parameter(GATE_UP).shape == (4, 2, 12, 8)
    ids = torch.arange(6).view(1, 6)
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, stock(input_ids=ids).logits)
    assert problems(stock, {"model.layers.*.mlp.experts.gate_up_proj": ["a", "b", "c", "d", "e"]}) == (
        f"tensor.fused: {GATE_UP} has 24 rows, which are not 5 equal parts",
    )


def test_stacked_experts_that_layers_share_are_refused() -> None:
    model = MixtralForCausalLM(MixtralConfig(**{**MIXTRAL.to_dict(), "num_hidden_layers": 2}))
    one, other = (layer.mlp.experts for layer in model.model.layers[:2])
    other.gate_up_proj = one.gate_up_proj
    fused = "model.layers.*.mlp.experts.gate_up_proj"
    assert problems(model, {fused: ["gate", "up"]}) == (
        f"tensor.fused: the parameters of {fused} are shared (they have several names in the model), so its parts "
        "cannot have their own; leave it out, or share none",
    )
