"""Files in another layout than the modules: missing and surplus tensors have the files' names."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers import conversion_mapping as table
from transformers.core_model_loading import ConversionOps, WeightConverter

from meshtrain.errors import ModelError
from meshtrain.models.build import stock_like
from meshtrain.models.weights.load import load_shards
from tests.models.gpt2 import GPT2
from tests.models.test_weights import LLAMA

MIXTRAL = MixtralConfig(
    vocab_size=13,
    hidden_size=8,
    intermediate_size=6,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=3,
    bos_token_id=0,
    eos_token_id=0,
)
EXPERTS = "model.layers.0.block_sparse_moe.experts"


def write(model: PreTrainedModel, folder: Path, change: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    """Write a model like stock `save_pretrained`, and change the content of the file."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(model: PreTrainedModel, folder: Path, **options: bool) -> dict[str, Tensor]:
    found = {name: torch.full_like(parameter, torch.nan) for name, parameter in model.named_parameters()}
    load_shards(found, folder, fused=(), stock=stock_like(model), **options)
    return found


def is_loaded(model: PreTrainedModel, folder: Path) -> bool:
    found = load(model, folder)
    return all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())


def refusal(model: PreTrainedModel, folder: Path) -> tuple[str, ...]:
    with pytest.raises(ModelError) as caught:
        load(model, folder)
    return caught.value.lines[:-1]


@pytest.fixture(scope="module")
def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MIXTRAL)


def test_experts_are_read_in_both_layouts(mixtral: MixtralForCausalLM, tmp_path: Path) -> None:
    assert f"{EXPERTS}.1.w3.weight" in load_file(write(mixtral, tmp_path) / "model.safetensors")
    assert is_loaded(mixtral, tmp_path)
    stacked = {name: parameter.detach() for name, parameter in mixtral.named_parameters()}
    save_file(stacked, tmp_path / "model.safetensors")
    assert is_loaded(mixtral, tmp_path)


def test_missing_and_surplus_tensors_have_the_names_in_the_files(mixtral: MixtralForCausalLM, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{EXPERTS}.2.w1.weight"]
        tensors[f"{EXPERTS}.3.w2.weight"] = tensors[f"{EXPERTS}.1.w2.weight"].clone()
        del tensors["model.layers.0.block_sparse_moe.gate.weight"]
        tensors["model.layers.1.block_sparse_moe.gate.weight"] = torch.ones(3, 8)

    assert refusal(mixtral, write(mixtral, tmp_path, change)) == (
        f"{tmp_path} lacks weights of the model (2): {EXPERTS}.2.w1.weight, "
        "model.layers.0.block_sparse_moe.gate.weight",
        f"{tmp_path} holds weights that the model does not have (2): model.layers.1.block_sparse_moe.gate.weight, "
        f"{EXPERTS}.3.w2.weight",
    )


def test_files_without_experts_lack_all_of_them(mixtral: MixtralForCausalLM, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".w2." in name]:
            del tensors[name]

    # The stacked parameter determines their number.
    assert refusal(mixtral, write(mixtral, tmp_path, change)) == (
        f"{tmp_path} lacks weights of the model (3): {EXPERTS}.0.w2.weight, {EXPERTS}.1.w2.weight, "
        f"{EXPERTS}.2.w2.weight",
    )


def test_experts_of_unequal_shapes_are_refused(mixtral: MixtralForCausalLM, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERTS}.1.w2.weight"] = torch.ones(8, 5)

    (problem,) = refusal(mixtral, write(mixtral, tmp_path, change))
    assert problem.startswith(f"{tmp_path} has weights of other shapes (1): model.layers.0.mlp.experts.down_proj ")
    assert problem.endswith("shapes (1, 8, 6), (1, 8, 5)")


def test_tensor_in_both_layouts_is_refused(mixtral: MixtralForCausalLM, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.down_proj"] = torch.ones(3, 8, 6)

    (problem,) = refusal(mixtral, write(mixtral, tmp_path, change))
    assert problem.startswith(f"{tmp_path} holds weights that the model does not have (")


def test_names_in_old_files_are_recognized(tmp_path: Path) -> None:
    class Norm(torch.nn.LayerNorm):
        pass

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2)
    model.transformer.LayerNorm = Norm(10)
    torch.nn.init.normal_(model.transformer.LayerNorm.weight)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["transformer.LayerNorm.gamma"] = tensors.pop("transformer.LayerNorm.weight")
        tensors["transformer.LayerNorm.beta"] = tensors.pop("transformer.LayerNorm.bias")

    write(model, tmp_path, change)
    found = {name: torch.full_like(parameter, torch.nan) for name, parameter in model.named_parameters()}
    load_shards(found, tmp_path, fused=(), stock=model.to("meta"))
    assert torch.equal(
        found["transformer.LayerNorm.weight"], load_file(tmp_path / "model.safetensors")["transformer.LayerNorm.gamma"]
    )


class Doubled(ConversionOps):
    """Computes, and does not only move values."""

    def convert(
        self, input_dict: dict[str, list[Tensor]], source_patterns: list[str], target_patterns: list[str], **_: object
    ) -> dict[str, Tensor]:
        (tensors,) = input_dict.values()
        first, second = (tensors[0] * 2).chunk(2)
        return {target_patterns[0]: first, target_patterns[1]: second}


def test_conversion_with_arithmetic_is_done_on_full_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converter = WeightConverter("mlp.both.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Doubled()])
    assert table.get_checkpoint_conversion_mapping("llama") is None
    monkeypatch.setitem(table._checkpoint_conversion_mapping_cache, "llama", [converter])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for layer in range(2):
        names = [f"model.layers.{layer}.mlp.{kind}_proj.weight" for kind in ("gate", "up")]
        tensors[f"model.layers.{layer}.mlp.both.weight"] = torch.cat([tensors.pop(name) for name in names]) / 2
    save_file(tensors, tmp_path / "model.safetensors")
    assert is_loaded(model, tmp_path)
    del tensors["model.layers.1.mlp.both.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert refusal(model, tmp_path) == (
        f"{tmp_path} lacks weights of the model (2): model.layers.1.mlp.gate_proj.weight, "
        "model.layers.1.mlp.up_proj.weight",
    )
