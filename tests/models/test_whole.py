"""The language half of multimodal models: found, loaded, and equal to the whole model on text."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

import meshtrain
from meshtrain.checkpoint.huggingface.whole import whole_layout
from meshtrain.compat.transformers import loop_over_experts
from meshtrain.config.run import ModelConfig
from meshtrain.errors import CheckpointError, ModelError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.whole.folder import half_of
from meshtrain.models.whole.proof import check_half, compare_on_text
from meshtrain.runtime.ranks import RankError
from tests.ranks import run_on_ranks
from tests.wholes import VOCABULARY, WHOLES, load_whole, whole_config, write_whole

FLOAT64 = {"parameters": "float64", "compute": "float64", "reduce": "float64"}
CLASSES = {
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "qwen3_vl": "Qwen3VLTextForCausalLM",
    "glm4v_moe": "Glm4vMoeTextForCausalLM",
}


def half_config(folder: Path, **values: Any) -> PretrainedConfig:
    return load_hf_config(ModelConfig(path=str(folder), **values))


def some_ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


def logits_of_half(folder: str, mask: Tensor, saved: str = "") -> Tensor:
    """Load the half of a folder on this rank, save the whole folder, and return its logits."""
    config = half_config(Path(folder))
    # Experts use a grouped matrix product by default, which does not support float64.
    loop_over_experts(config)
    model = meshtrain.build_model(config, dtype="float64")
    model = meshtrain.parallelize(model, {"precision": FLOAT64}, prove_unknown_class=False)
    meshtrain.load_weights(model, folder)
    if saved:
        meshtrain.save_pretrained(model, saved)
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=some_ids(), attention_mask=mask).logits
    return found


@pytest.mark.parametrize("model_type", sorted(WHOLES))
def test_half_computes_what_the_whole_stock_class_does_on_text(model_type: str, tmp_path: Path) -> None:
    write_whole(tmp_path / "whole", model_type)
    half, _ = half_of(half_config(tmp_path / "whole"))
    assert type(build_meta_model(half_config(tmp_path / "whole"), dtype=torch.float32)).__name__ == CLASSES[model_type]
    assert half.count_rest()
    assert not any("language" in name for name in half.count_rest())
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = 0
    (found,) = run_on_ranks(1, logits_of_half, str(tmp_path / "whole"), mask, str(tmp_path / "saved"))
    whole = load_whole(tmp_path / "whole", torch.float64)
    with torch.no_grad():
        expected = whole(input_ids=some_ids(), attention_mask=mask, use_cache=False).logits
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    # What was not trained is the same in the folder that is written back.
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_half_whose_whole_class_computes_something_else_is_refused() -> None:
    # The class of its text model scales the logits, and the whole class does not.
    with pytest.raises(ModelError, match=r"half of cohere2_vision alone does not compute what the whole .* differ by"):
        check_half(CONFIG_MAPPING["cohere2_vision"]())
    with pytest.raises(ModelError, match=r"half of blip-2 computes .* cannot be checked on a tiny copy: .*pixel_va"):
        check_half(CONFIG_MAPPING["blip-2"]())


def test_type_without_a_text_model_of_its_own_is_refused(tmp_path: Path) -> None:
    CONFIG_MAPPING["kosmos-2"](architectures=["Kosmos2ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"Kosmos2ForConditionalGeneration has a language half of type 'kosmos_2_"):
        half_config(tmp_path)


def test_ties_are_those_of_the_whole_model(tmp_path: Path) -> None:
    config = whole_config("qwen3_vl")
    config.save_pretrained(tmp_path)
    assert half_config(tmp_path).tie_word_embeddings
    config.tie_word_embeddings = False
    config.save_pretrained(tmp_path)
    assert not half_config(tmp_path).tie_word_embeddings
    with pytest.raises(
        ModelError, match=r"model\.config\.tie_word_embeddings: .* multimodal model, which decides it; "
    ):
        half_config(tmp_path, config={"tie_word_embeddings": True})


def test_values_of_the_half_can_be_changed(tmp_path: Path) -> None:
    whole_config("mistral3").save_pretrained(tmp_path)
    assert half_config(tmp_path, config={"sliding_window": 7}).sliding_window == 7
    with pytest.raises(ModelError, match=r"model\.config\.slidingwindow: mistral has no such value; did you mean"):
        half_config(tmp_path, config={"slidingwindow": 7})


def test_positions_of_a_tiny_head_are_shared_by_all_sections() -> None:
    assert compare_on_text(whole_config("glm4v_moe")) == 0.0
    assert whole_config("glm4v_moe").text_config.rope_parameters["mrope_section"] == [0, 1, 1]
    assert sum(whole_config("qwen3_vl").text_config.rope_parameters["mrope_section"]) == 4


def rename(file: Path, change: Callable[[str], str]) -> None:
    save_file({change(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def test_experts_under_old_names_keep_them(tmp_path: Path) -> None:
    write_whole(tmp_path, "glm4v_moe")
    rename(tmp_path / "model.safetensors", lambda name: name.removeprefix("model."))
    before = load_file(tmp_path / "model.safetensors")
    run_on_ranks(1, logits_of_half, str(tmp_path), torch.ones(2, 12, dtype=torch.long), str(tmp_path / "saved"))
    after = load_file(tmp_path / "saved/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weights_in_a_form_that_is_not_written_are_refused(tmp_path: Path) -> None:
    write_whole(tmp_path, "glm4v_moe")
    # One expert has an old name, and the others of its layer have the new one.
    rename(tmp_path / "model.safetensors", lambda name: name.removeprefix("model.") if "experts.1." in name else name)
    half, folder = half_of(half_config(tmp_path))
    with pytest.raises(CheckpointError, match=r"has weights of the language half in a form that .* does not write"):
        whole_layout(half, folder)


def test_missing_weights_of_the_whole_model_are_named(tmp_path: Path) -> None:
    write_whole(tmp_path, "gemma3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    removed = next(name for name in tensors if "layers.1.mlp" in name)
    save_file({name: one for name, one in tensors.items() if name != removed}, file, {"format": "pt"})
    with pytest.raises(RankError, match=f"lacks weights of the model .*{re.escape(removed)}"):
        run_on_ranks(1, logits_of_half, str(tmp_path), torch.ones(2, 12, dtype=torch.long))
