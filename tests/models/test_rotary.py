"""The state that rotary modules keep of earlier sequences."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from meshtrain.models.initialize import restore_buffers
from meshtrain.models.rotary import apply_sequence_length as see
from meshtrain.models.rotary import constant_length, grown_length, length_dependent, most_positions, probed
from tests.parity import DYNAMIC, LONGROPE
from tests.tiny import tiny_config

ROPE = {"llama": DYNAMIC, "phi3": LONGROPE, "gemma3_text": {"full_attention": DYNAMIC, "sliding_attention": LONGROPE}}
POSITIONS = {"llama": {"max_position_embeddings": 10}, "phi3": {"original_max_position_embeddings": 10}}


def model_of(model_type: str, **rope: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    for name, value in POSITIONS.get(model_type, {"max_position_embeddings": 10}).items():
        setattr(config, name, value)
    config.rope_parameters = copy.deepcopy(rope or ROPE[model_type])
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def logits(model: PreTrainedModel, length: int) -> Tensor:
    return model(torch.arange(3, 3 + length)[None], use_cache=False).logits


@pytest.mark.parametrize("model_type", ROPE)
def test_see_has_the_effect_of_computing_the_sequence(model_type: str) -> None:
    for history in ((14,), (14, 20), (14, 8), (20, 1, 13)):
        computed, seen = model_of(model_type), model_of(model_type)
        for length in history:
            logits(computed, length)
            see(seen, length)
        assert grown_length(seen) == grown_length(computed)
        assert grown_length(seen) == (0 if model_type == "phi3" or history[-1] < 10 else history[-1])
        assert torch.equal(logits(seen, 12), logits(computed, 12)), history


@pytest.mark.parametrize("model_type", ROPE)
def test_restored_buffers_have_seen_no_sequence(model_type: str) -> None:
    model, used = model_of(model_type), model_of(model_type)
    logits(used, 20)
    with torch.no_grad():
        restore_buffers(used)
    assert grown_length(used) == 0
    for length in (12, 14, 12):
        assert torch.equal(logits(used, length), logits(model, length))


def attributes(model: PreTrainedModel) -> dict[str, Any]:
    found = {}
    for name, module in length_dependent(model).items():
        found |= {f"{name}.{key}": value for key, value in vars(module).items() if not key.startswith("_")}
        found |= {f"{name}.{key}": id(value) for key, value in module._buffers.items()}
    return found


@pytest.mark.parametrize("seen", [0, 20])
@pytest.mark.parametrize("model_type", ROPE)
def test_probe_on_meta_changes_nothing(model_type: str, seen: int) -> None:
    model = model_of(model_type)
    if seen:
        logits(model, seen)
    before = attributes(model.to("meta"))
    with probed(model, 3):
        see(model, 3)
        assert attributes(model) != before
    assert attributes(model) == before


def test_length_up_to_which_frequencies_are_constant() -> None:
    found = {model_type: constant_length(model_of(model_type)) for model_type in ROPE}
    assert found == {"llama": 10, "phi3": 10, "gemma3_text": 10}
    linear = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    assert constant_length(model_of("llama", **linear)) is None
    assert length_dependent(model_of("llama", **linear)) == {}


def test_number_of_positions_of_a_model() -> None:
    assert most_positions(AutoConfig.for_model("llama", max_position_embeddings=64)) == 64
    assert most_positions(AutoConfig.for_model("llama", max_position_embeddings=64, rope_parameters=DYNAMIC)) is None
    assert most_positions(AutoConfig.for_model("xlnet")) is None
    assert most_positions(AutoConfig.for_model("bloom")) is None
