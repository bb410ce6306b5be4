"""Models on any mesh generate the text of the stock model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, GPT2LMHeadModel

import meshtrain
from meshtrain.errors import ModelError, UserError
from meshtrain.models.build import load_hf_config
from meshtrain.verify.reference import copy_weights_into as load_stock
from tests.parity import MODELS, Case, build, build_stock, fill, stock_weights
from tests.ranks import run_on_ranks

GPT2 = GPT2Config(
    vocab_size=61, n_positions=40, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, initializer_range=0.5
)
PROMPT = torch.tensor([[5, 9, 31, 7], [0, 0, 17, 3]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
OPTIONS: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 8, "pad_token_id": 0}
SAMPLING = GenerationConfig(do_sample=True, top_k=10, max_new_tokens=8, pad_token_id=0, eos_token_id=2)


def stock() -> GPT2LMHeadModel:
    torch.manual_seed(2)
    return GPT2LMHeadModel(GPT2)


def generate_texts(mesh: dict[str, int] | None) -> list[Tensor]:
    """Generate in several modes."""
    model: Any = stock() if mesh is None else meshtrain.parallelize(stock(), {"mesh": mesh})
    if mesh is None:
        model.eval()
    torch.manual_seed(4)
    texts = [model.generate(PROMPT, SAMPLING, attention_mask=MASK), model.generate(PROMPT, num_beams=3, **OPTIONS)]
    if mesh is not None:
        assert torch.equal(meshtrain.generate(model, PROMPT, num_beams=3, **OPTIONS), texts[1])
        stages = model._pipeline.stages if "pp" in mesh else []
        assert all(stage.model.training for stage in stages)
    return texts


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_parallel_model_generates_the_text_of_the_stock_model(mesh: dict[str, int]) -> None:
    expected = generate_texts(None)
    world_size = 2 ** len(mesh)
    for texts in run_on_ranks(world_size, generate_texts, mesh):
        for text, wanted in zip(texts, expected, strict=True):
            assert torch.equal(text, wanted)
    assert len(set(expected[0].flatten().tolist())) > 8


def generate_without_values() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2)
    meshtrain.generate(meshtrain.parallelize(model, {"mesh": {"pp": 2}}), PROMPT, **OPTIONS)


def test_generate_refuses_a_model_without_values() -> None:
    with pytest.raises(AssertionError) as failed:
        run_on_ranks(2, generate_without_values)
    assert isinstance(failed.value.original, ModelError)  # type: ignore[attr-defined]
    assert "have no values yet" in str(failed.value)


def refuse_prompts_and_options() -> list[str]:
    model = meshtrain.parallelize(stock(), {"mesh": {"pp": 2}})
    messages = []
    for prompt, options in ((PROMPT.double(), {}), (PROMPT[0], {}), (PROMPT, {"guidance_scale": 1.5})):
        with pytest.raises(UserError) as refused:
            meshtrain.generate(model, prompt, **OPTIONS | options)
        messages.append(str(refused.value))
    return messages


def test_unsupported_prompts_and_options_are_refused_on_all_stages() -> None:
    for messages in run_on_ranks(2, refuse_prompts_and_options):
        assert messages == [
            "generate: the prompts are (2, 4) float64; pass token ids (batch, seq), integers",
            "generate: the prompts are (4,) int64; pass token ids (batch, seq), integers",
            "generate: guidance_scale calls the model a second time with a cache that no stage knows; leave it out, or "
            "use a mesh with pp = 1",
        ]


def generate_from_files(folder: Path) -> None:
    """Load the generation config with a model from meta, as stock `from_pretrained` does."""
    wanted = AutoModelForCausalLM.from_pretrained(folder / "stock").generate(PROMPT, attention_mask=MASK)
    for number, mesh in enumerate(({"tp": 2}, {"pp": 2})):
        model = meshtrain.parallelize(meshtrain.build_model(folder / "stock"), {"mesh": mesh})
        meshtrain.load_weights(model, folder / "stock")
        assert torch.equal(meshtrain.generate(model, PROMPT, attention_mask=MASK), wanted)
        model.save_pretrained(folder / f"whole-{number}")
        model.save_parallelized(folder / f"parts-{number}")
        again = meshtrain.parallelize(meshtrain.build_model(folder / f"parts-{number}"), {"mesh": mesh})
        meshtrain.load_weights(again, folder / f"parts-{number}")
        assert torch.equal(meshtrain.generate(again, PROMPT, attention_mask=MASK), wanted)
    # A model built from a configuration takes it from the files, unless the program has set it.
    for is_set in (False, True):
        model = meshtrain.parallelize(meshtrain.build_model(GPT2), {"mesh": {"tp": 2}})
        if is_set:
            model.generation_config = GenerationConfig(max_new_tokens=2, pad_token_id=0)
        meshtrain.load_weights(model, folder / "stock")
        text = meshtrain.generate(model, PROMPT, attention_mask=MASK)
        assert torch.equal(text, wanted) is not is_set


def test_generation_config_is_loaded_and_saved_with_the_weights(tmp_path: Path) -> None:
    model = stock()
    model.generation_config = GenerationConfig(
        max_new_tokens=7, num_beams=2, pad_token_id=0, eos_token_id=[2, *range(40, 50)], repetition_penalty=1.5
    )
    model.save_pretrained(tmp_path / "stock")
    run_on_ranks(2, generate_from_files, tmp_path)
    for number in range(2):
        written = GenerationConfig.from_pretrained(tmp_path / f"whole-{number}").to_diff_dict()
        assert written == GenerationConfig.from_pretrained(tmp_path / "stock").to_diff_dict()


def generate_in_a_run(mesh: tuple[int, int, int, int]) -> Tensor:
    """Generate with the pipeline of a run as its hooks hold it; logits stay sharded over tp."""
    case = Case("gpt2-odd", mesh)
    pipeline = build(case)
    fill(pipeline, stock_weights(case.model))
    assert pipeline.logits_are_sharded == (mesh[3] > 1)
    return meshtrain.generate(pipeline, PROMPT, num_beams=3, **OPTIONS)


def generate_in_one_process() -> Tensor:
    model = build_stock(load_hf_config(MODELS["gpt2-odd"]))
    load_stock(model, stock_weights("gpt2-odd"))
    return model.eval().generate(PROMPT, num_beams=3, **OPTIONS)


@pytest.mark.parametrize("mesh", [(1, 1, 1, 2), (2, 1, 1, 1), (1, 1, 2, 1)], ids=str)
def test_model_of_a_run_generates_the_text_of_the_stock_model(mesh: tuple[int, int, int, int]) -> None:
    wanted = run_on_ranks(1, generate_in_one_process)[0]
    assert all(torch.equal(text, wanted) for text in run_on_ranks(2, generate_in_a_run, mesh))
