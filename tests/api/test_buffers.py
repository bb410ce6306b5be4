"""Buffers keep their values and number formats."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshtrain
from tests.ranks import run_on_ranks

LLAMA = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def tables_after() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return dict(meshtrain.parallelize(model, {"mesh": {"tp": 2}}).named_buffers())


def test_rotary_frequencies_keep_their_values_and_number_format() -> None:
    expected = dict(LlamaForCausalLM(LLAMA).named_buffers())
    for tables in run_on_ranks(2, tables_after):
        assert tables.keys() == expected.keys()
        for name, table in tables.items():
            assert table.dtype == torch.float32
            assert torch.equal(table, expected[name])
