"""Tied parameters must match the configuration."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from meshtrain.config.run import ModelConfig
from meshtrain.errors import ModelError
from meshtrain.models.build import load_hf_config, stock_model
from meshtrain.models.ties import check_ties
from tests.parity import MODELS

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def with_values(name: str) -> Any:
    return AutoModelForCausalLM.from_config(load_hf_config(MODELS[name]))


def tie_by_hand(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def tie_memory(model: Any) -> None:
    model.lm_head.weight.data = model.model.embed_tokens.weight.data


def tie_inside(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def repeat_a_layer(model: Any) -> None:
    model.model.layers[2] = model.model.layers[0]


def tie_a_third(model: Any) -> None:
    model.extra = nn.Linear(1, 1)
    model.extra.weight = model.lm_head.weight


def untie_by_hand(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


ADVICE = "give each its own, such as module.weight = nn.Parameter(other.weight.detach().clone())"
SAY_SO = "the configuration does not say so; set model.config.tie_word_embeddings = True before, or"
NO_TIE = "LlamaForCausalLM knows of no such tie, which would come apart when it is cut or saved;"
INSIDE = "model.layers.0.mlp.up_proj.weight and model.layers.2.mlp.up_proj.weight"
UNTIED = (
    f"{HEAD} and {EMBEDDING} are two parameters, but the configuration says that they are one; set "
    "model.config.tie_word_embeddings = False before, or call model.tie_weights()"
)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama-untied", tie_by_hand, f"{HEAD} and {EMBEDDING} are one parameter, but {SAY_SO} {ADVICE}"),
        ("llama-untied", tie_memory, f"{HEAD} and {EMBEDDING} are one parameter, but {SAY_SO} {ADVICE}"),
        ("llama-untied", tie_inside, f"{INSIDE} are one parameter, but {NO_TIE} {ADVICE}"),
        ("llama-tied", tie_inside, f"{INSIDE} are one parameter, but {NO_TIE} {ADVICE}"),
        ("llama-tied", untie_by_hand, UNTIED),
        ("llama-tied", tie_a_third, f"extra.weight and {HEAD} are one parameter, but {NO_TIE} {ADVICE}"),
    ],
)
def test_ties_that_differ_from_the_configuration_are_refused(
    name: str, change: Callable[[Any], None], message: str
) -> None:
    model = with_values(name)
    change(model)
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        check_ties(model)
    on_meta = stock_model(type(model), model.config, torch.float32)
    if change is not tie_memory:
        change(on_meta)
        with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
            check_ties(on_meta)


def test_repeated_layer_is_refused() -> None:
    model = with_values("llama-untied")
    repeat_a_layer(model)
    with pytest.raises(ModelError, match=r"^model\.layers\.0\.\S+ and model\.layers\.2\.\S+ are one parameter, but"):
        check_ties(model)


@pytest.mark.parametrize(
    ("name", "change", "is_tied", "ties"),
    [("llama-untied", tie_by_hand, True, {HEAD: EMBEDDING}), ("llama-tied", untie_by_hand, False, {})],
)
def test_changed_configuration_is_used(
    name: str, change: Callable[[Any], None], is_tied: bool, ties: dict[str, str]
) -> None:
    model = with_values(name)
    change(model)
    model.config.tie_word_embeddings = is_tied
    check_ties(model)
    assert model.all_tied_weights_keys == ties


@pytest.mark.parametrize(
    "model_type", ["gpt2", "llama", "gemma2", "opt", "gpt_neox", "mixtral", "bart", "bert", "falcon"]
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_stock_models_are_tied_as_configured(model_type: str, is_tied: bool) -> None:
    config = load_hf_config(ModelConfig(type=model_type))
    config.tie_word_embeddings = is_tied
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ties = dict(model.all_tied_weights_keys)
    check_ties(model)
    assert model.all_tied_weights_keys == ties
    assert bool(ties) is is_tied
