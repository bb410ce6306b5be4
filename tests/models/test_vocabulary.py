"""A larger vocabulary than in the files gets mean rows, equal on every mesh."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import GPT2LMHeadModel, GPTJConfig, GPTJForCausalLM, LlamaForCausalLM, PreTrainedModel

from meshtrain.errors import ModelError
from meshtrain.models.build import stock_like
from meshtrain.models.weights.load import load_shards
from tests.models.gpt2 import GPT2
from tests.models.test_weights import LLAMA
from tests.ranks import run_on_ranks

GPTJ = GPTJConfig(vocab_size=13, n_positions=7, n_embd=8, n_layer=1, n_head=2, rotary_dim=2)
LARGER = 21
KINDS = {"llama": LlamaForCausalLM(LLAMA), "gpt2": GPT2LMHeadModel(GPT2), "gptj": GPTJForCausalLM(GPTJ)}


def with_tokens(model: PreTrainedModel, number: int) -> PreTrainedModel:
    """Return the same model on meta with another vocabulary size."""
    other = stock_like(model)
    other.config.vocab_size = number
    return stock_like(other)


def load(model: PreTrainedModel, folder: Path, *, tokens: int = LARGER, enlarge: bool = True) -> dict[str, Tensor]:
    stock = with_tokens(model, tokens)
    found = {name: torch.full(parameter.shape, torch.nan) for name, parameter in stock.named_parameters()}
    load_shards(found, folder, fused=(), stock=stock, enlarge_vocabulary=enlarge)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_new_rows_are_the_mean_of_the_rows_in_the_files(kind: str, tmp_path: Path) -> None:
    model = KINDS[kind]
    model.save_pretrained(tmp_path)
    found, stock = load(model, tmp_path), dict(model.named_parameters())
    larger = {name for name, parameter in stock.items() if parameter.shape != found[name].shape}
    assert (
        larger
        == {
            "llama": {"model.embed_tokens.weight", "lm_head.weight"},
            "gpt2": {"transformer.wte.weight"},
            "gptj": {"transformer.wte.weight", "lm_head.weight", "lm_head.bias"},
        }[kind]
    )
    for name, parameter in stock.items():
        assert torch.equal(found[name][: len(parameter)], parameter)
        mean = parameter.detach().double().mean(0, keepdim=True).float().expand_as(found[name][len(parameter) :])
        torch.testing.assert_close(found[name][len(parameter) :], mean, rtol=2e-7, atol=1e-8)


def load_sharded(folder: Path, dim: int) -> Tensor:
    stock = with_tokens(KINDS["llama"], LARGER)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Module()
    for index, (_, parameter) in enumerate(stock.named_parameters()):
        placement = Shard(dim if parameter.shape[0] == LARGER else 0)
        value = distribute_tensor(torch.full(parameter.shape, torch.nan), mesh["tp"], [placement])
        module.register_parameter(str(index), nn.Parameter(value))
    fully_shard(module, mesh=mesh["dp"])
    names = [name for name, _ in stock.named_parameters()]
    parameters: dict[str, Tensor] = {names[int(index)]: value for index, value in module.named_parameters()}
    load_shards(parameters, folder, fused=(), stock=stock, enlarge_vocabulary=True)
    embedding = parameters["model.embed_tokens.weight"]
    assert isinstance(embedding, DTensor)
    return embedding.full_tensor().detach()


@pytest.mark.parametrize("dim", [0, 1])
def test_new_rows_have_equal_bits_on_every_mesh(dim: int, tmp_path: Path) -> None:
    KINDS["llama"].save_pretrained(tmp_path)
    alone = load(KINDS["llama"], tmp_path)["model.embed_tokens.weight"]
    assert all(torch.equal(found, alone) for found in run_on_ranks(4, load_sharded, tmp_path, dim))


def test_mean_covers_all_chunks_of_a_vocabulary(tmp_path: Path) -> None:
    model = LlamaForCausalLM(with_tokens(KINDS["llama"], 5000).config)
    model.save_pretrained(tmp_path)
    found = load(model, tmp_path, tokens=5001)["lm_head.weight"]
    torch.testing.assert_close(found[5000].double(), model.lm_head.weight.double().mean(0), rtol=1e-6, atol=1e-9)


def refusal(folder: Path, *, tokens: int, enlarge: bool) -> tuple[str, ...]:
    with pytest.raises(ModelError) as caught:
        load(KINDS["llama"], folder, tokens=tokens, enlarge=enlarge)
    return caught.value.lines


def test_larger_vocabulary_without_the_option_is_an_error_that_names_it(tmp_path: Path) -> None:
    KINDS["llama"].save_pretrained(tmp_path)
    assert refusal(tmp_path, tokens=LARGER, enlarge=False) == (
        f"{tmp_path} has weights of other shapes (2): model.embed_tokens.weight is (13, 8) in the files and (21, 8) "
        "in the model, lm_head.weight is (13, 8) in the files and (21, 8) in the model",
        "the model has more tokens than the files: set model.enlarge_vocabulary = true (in a program: "
        "enlarge_vocabulary=True) to set the new rows to the mean of the known ones",
    )


def test_smaller_vocabulary_is_an_error_with_the_option_too(tmp_path: Path) -> None:
    KINDS["llama"].save_pretrained(tmp_path)
    assert refusal(tmp_path, tokens=12, enlarge=True) == (
        f"{tmp_path} has weights of other shapes (2): model.embed_tokens.weight is (13, 8) in the files and (12, 8) "
        "in the model, lm_head.weight is (13, 8) in the files and (12, 8) in the model",
        "use the configuration that belongs to these weights, or other weights",
    )


def test_equal_vocabulary_is_read_as_without_the_option(tmp_path: Path) -> None:
    KINDS["llama"].save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, wanted[name]) for name, value in load(KINDS["llama"], tmp_path, tokens=13).items())
