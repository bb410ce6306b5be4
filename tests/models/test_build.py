"""Models on meta, and the messages if a model cannot be built."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from meshtrain.config.run import ModelConfig
from meshtrain.errors import ModelError
from meshtrain.models.build import build_meta_model, load_hf_config, local_directory
from meshtrain.models.dtypes import DTYPES

TINY = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64}
IDS = {"bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def problems(**model: Any) -> tuple[str, ...]:
    """Return the messages when the model is loaded and built."""
    with pytest.raises(ModelError) as caught:
        build_meta_model(load_hf_config(ModelConfig(**model)), dtype=torch.float32)
    for problem in caught.value.lines:
        assert "\n" not in problem
    return caught.value.lines


def write_config(directory: Path, text: str) -> str:
    (directory / "config.json").write_text(text)
    return str(directory)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_new_model_is_on_meta_in_training_mode(dtype: torch.dtype) -> None:
    config = load_hf_config(ModelConfig(type="gpt2", config={**TINY, **IDS}))
    model = build_meta_model(config, dtype=dtype)
    assert all(parameter.is_meta and parameter.dtype == dtype for parameter in model.parameters())
    assert model.training
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (2, 32)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_attention_implementation_is_the_requested_one() -> None:
    config = load_hf_config(ModelConfig(type="gpt2", config={**TINY, **IDS}))
    assert build_meta_model(config, dtype=torch.float32).config._attn_implementation == "sdpa"
    assert build_meta_model(config, dtype=torch.float32, attention="eager").config._attn_implementation == "eager"
    config._attn_implementation = "eager"
    assert build_meta_model(config, dtype=torch.float32, attention=None).config._attn_implementation == "eager"
    assert build_meta_model(config, dtype=torch.float32).config._attn_implementation == "sdpa"


def test_config_values_override_those_of_a_directory(tmp_path: Path) -> None:
    file = write_config(tmp_path, json.dumps({"model_type": "gpt2", **TINY, **IDS, "dtype": "bfloat16"}))
    # One of the stock names, and one that transformers accepts for every model.
    config = load_hf_config(ModelConfig(path=file, config={"n_layer": 3, "hidden_size": 64}))
    assert (config.n_layer, config.n_embd, config.n_head) == (3, 64, 4)
    model = build_meta_model(config, dtype=torch.float32)
    assert model.transformer.wte.weight.dtype == torch.float32, "a bfloat16 file trains with float32 parameters"


def test_transformers_prints_nothing(capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    config = load_hf_config(ModelConfig(type="gpt2", config={**TINY, "eos_token_id": 7}))
    build_meta_model(config, dtype=torch.float32)
    load_hf_config(ModelConfig(type="llama", config={"vocab_size": 64, "num_hidden_layers": 1}))
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def test_unknown_type_is_refused() -> None:
    assert problems(type="gpt3") == ("model.type = 'gpt3': transformers has no such model type; did you mean 'gptj'?",)
    assert problems(type="lama") == ("model.type = 'lama': transformers has no such model type; did you mean 'llama'?",)
    assert problems(type="zzzzzz") == (
        "model.type = 'zzzzzz': transformers has no such model type; see the model types of transformers",
    )


def test_type_without_a_causal_language_model_is_refused() -> None:
    assert problems(type="vit") == ("model type 'vit' has no causal language model in transformers; use one that has",)


def test_unknown_values_are_all_named() -> None:
    assert problems(type="gpt2", config={"n_layers": 2, "hiden_size": 32, "qqqq": 1, "n_head": 4}) == (
        "model.config.n_layers: gpt2 has no such value; did you mean 'n_layer'?",
        "model.config.hiden_size: gpt2 has no such value; did you mean 'hidden_size'?",
        "model.config.qqqq: gpt2 has no such value",
    )


def test_undeclared_value_that_the_model_uses_is_accepted(tmp_path: Path) -> None:
    """Values that published GLM-4.5 configurations have and their class does not declare."""
    values = {"num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16, "rope_theta": 10000, **IDS}
    config = load_hf_config(ModelConfig(type="glm4_moe", config={**values, "partial_rotary_factor": 0.25}))
    rope = config.rope_parameters
    assert (config.head_dim, rope["rope_theta"], rope["partial_rotary_factor"]) == (16, 10000, 0.25)
    model = build_meta_model(config, dtype=torch.float32)
    assert model.model.layers[0].self_attn.q_proj.out_features == 4 * 16
    assert problems(type="glm4_moe", config={"head_dims": 16, "gradient_checkpointing": True, "temperature": 0.5}) == (
        "model.config.head_dims: glm4_moe has no such value",
        "model.config.gradient_checkpointing: glm4_moe has no such value",
        "model.config.temperature: glm4_moe has no such value",
    )
    file = write_config(tmp_path, json.dumps({"model_type": "glm4_moe", **values}))
    assert load_hf_config(ModelConfig(path=file, config={"head_dim": 8})).head_dim == 8
    assert problems(path=file, config={"rope_theta": 5.0}) == ("model.config.rope_theta: glm4_moe has no such value",)


def test_unknown_value_for_a_directory_is_refused(tmp_path: Path) -> None:
    file = write_config(tmp_path, json.dumps({"model_type": "gpt2", **TINY, **IDS}))
    assert problems(path=file, config={"n_layr": 3}) == (
        "model.config.n_layr: gpt2 has no such value; did you mean 'n_layer'?",
    )


@pytest.mark.parametrize("beside", ["type", "directory"])
def test_value_of_a_wrong_type_is_refused(tmp_path: Path, beside: str) -> None:
    file = write_config(tmp_path, json.dumps({"model_type": "gpt2", **TINY, **IDS}))
    origin = {"type": "gpt2"} if beside == "type" else {"path": file}
    assert problems(**origin, config={"n_layer": "two"}) == (
        "model.config: transformers refuses it for 'gpt2': Field 'n_layer' expected int, got str (value: 'two')",
    )


def test_contradicting_values_are_refused() -> None:
    assert problems(type="llama", config={"hidden_size": 32, "num_attention_heads": 3}) == (
        "model.config: transformers refuses it for 'llama': The hidden size (32) is not a multiple of the number of "
        "attention heads (3).",
    )
    (problem,) = problems(type="gpt2", config={**TINY, **IDS, "n_embd": 30})
    assert problem.startswith("transformers cannot build a gpt2 model from this configuration: `embed_dim` must be ")
    assert problems(type="llama", config={"vocab_size": 10, "num_hidden_layers": 1, "pad_token_id": 77}) == (
        "model.config.pad_token_id = 77; set it to a token below vocab_size = 10",
    )


def test_unsupported_attention_is_refused() -> None:
    assert problems(type="bloom") == (
        "attention = 'sdpa': transformers does not support it for 'bloom'; use 'eager' (model.attention in a run file)",
    )


def test_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    assert problems(path=str(tmp_path)) == (
        f"model.path = '{tmp_path}': the directory holds no config.json; use a Hugging Face model, or a "
        "checkpoint (a step-N directory)",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not a valid JSON file."),
        ("{}", "Should have a `model_type` key in its config.json."),
        ('{"model_type": "gpt9"}', "has model type `gpt9` but Transformers does not recognize this architecture."),
        ('{"model_type": "gpt2", "n_layer": "x"}', "Field 'n_layer' expected int, got str (value: 'x')"),
    ],
)
def test_directory_with_a_broken_configuration_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (problem,) = problems(path=write_config(tmp_path, text))
    assert problem.startswith(f"model.path = '{tmp_path}': it holds no Hugging Face model: ")
    assert reason in problem


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nobody/nothing", "no such directory, and it cannot be downloaded from the hub: "),
        ("./no/such/directory", "there is no such directory, and a hub id looks like 'owner/name'"),
    ],
)
def test_path_that_is_neither_a_directory_nor_on_the_hub_is_refused(path: str, reason: str) -> None:
    (problem,) = problems(path=path)
    assert problem.startswith(f"model.path = {path!r}: it holds no Hugging Face model: ")
    with pytest.raises(ModelError, match=reason) as caught:
        local_directory(path)
    assert str(caught.value).startswith(f"model.path = {path!r}: ")


def test_class_that_transformers_cannot_build_is_refused() -> None:
    assert problems(type="dbrx") == (
        "transformers' own code fails to build a dbrx model: 'DbrxAttentionConfig' object has no attribute "
        "'rope_theta'",
    )


def test_local_directory_is_returned_unchanged(tmp_path: Path) -> None:
    assert local_directory(str(tmp_path)) == tmp_path


def test_bidirectional_encoder_is_refused() -> None:
    model = ModelConfig(type="bert", config={"num_hidden_layers": 1})
    with pytest.raises(ModelError, match=r"is_decoder = false: a bert then sees the tokens .*; set it to true"):
        build_meta_model(load_hf_config(model), dtype=torch.float32)
    decoder = model.model_copy(update={"config": {**model.config, "is_decoder": True}})
    assert build_meta_model(load_hf_config(decoder), dtype=torch.float32).config.is_decoder
