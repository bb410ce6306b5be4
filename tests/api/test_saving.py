"""Saving the weights of a program's own parallel model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTForSequenceClassification

import meshtrain
from meshtrain.api.handle import pipeline_of
from meshtrain.checkpoint.huggingface.export import merge
from meshtrain.errors import CheckpointError, ModelError
from meshtrain.models.build import load_hf_config
from tests.api.folders import write_llama
from tests.api.programs import parallel, stock_model
from tests.checkpoint.folders import assert_same
from tests.parity import MODELS
from tests.ranks import run_on_ranks
from tests.tiny import tiny_config


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(load_hf_config(MODELS["gpt2-tied"])).to(torch.bfloat16)


def save_gpt2(folder: Path) -> None:
    model = meshtrain.parallelize(gpt2(), {"mesh": {"tp": 2}})
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    model.save_pretrained(folder / "method")
    meshtrain.save_pretrained(model, folder / "function", max_shard_size="50KB", dtype=torch.float32)
    meshtrain.save_parallelized(model, folder / "parts")
    again = meshtrain.parallelize(meshtrain.build_model(model.config, dtype=torch.bfloat16), {"mesh": {"pp": 2}})
    with pytest.raises(ModelError, match="the parameters of this model have no values yet"):
        meshtrain.save_pretrained(again, folder / "never")
    meshtrain.load_weights(again, folder / "parts")
    again.save_pretrained(folder / "again")


def test_parallel_model_is_saved_like_the_stock_model(tmp_path: Path) -> None:
    run_on_ranks(2, save_gpt2, tmp_path, joins=False)
    merge(tmp_path / "parts", tmp_path / "merged")
    stock = gpt2()
    stock.save_pretrained(tmp_path / "stock")
    for name in ("method", "merged", "again"):
        assert_same(tmp_path / name, tmp_path / "stock")
    stock.float().save_pretrained(tmp_path / "float32", max_shard_size="50KB")
    assert_same(tmp_path / "function", tmp_path / "float32")


def save_after_casts(folder: Path, plan: dict[str, Any]) -> list[str]:
    """Save a model of a bfloat16 configuration after casts; return the messages."""
    model = GPT2LMHeadModel.from_pretrained(folder / "bfloat16")
    assert model.config.dtype == torch.bfloat16
    trained = meshtrain.parallelize(model, {**plan, "precision": {"parameters": "float32", "compute": "float32"}})
    meshtrain.save_pretrained(trained, folder / "trained in float32")
    cast = meshtrain.parallelize(GPT2LMHeadModel.from_pretrained(folder / "bfloat16").float(), plan)
    meshtrain.save_pretrained(cast, folder / "cast to float32")
    messages = []
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(CheckpointError) as refused:
            meshtrain.save_pretrained(cast, folder / "never", dtype=dtype)
        messages.append(str(refused.value))
    pipeline_of(cast).stages[0].model.generation_config.update(do_sample=False, temperature=0.7)
    with pytest.raises(CheckpointError) as refused:
        meshtrain.save_pretrained(cast, folder / "never")
    return [*messages, str(refused.value)]


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}])
def test_saved_files_have_the_number_format_of_the_original_values(tmp_path: Path, mesh: dict[str, int]) -> None:
    gpt2().save_pretrained(tmp_path / "bfloat16")
    GPT2LMHeadModel.from_pretrained(tmp_path / "bfloat16").float().save_pretrained(tmp_path / "float32")
    answers = run_on_ranks(2, save_after_casts, tmp_path, {"mesh": mesh}, joins=False)
    assert_same(tmp_path / "trained in float32", tmp_path / "bfloat16")
    assert_same(tmp_path / "cast to float32", tmp_path / "float32")
    assert not (tmp_path / "never").exists()
    formats = "torch.float64, torch.float32, torch.bfloat16, torch.float16"
    for *casts, generation in answers:
        assert casts == [
            f"dtype = torch.{name} is not a format that weights are saved in; pass {formats}"
            for name in ("int8", "float8_e4m3fn")
        ]
        assert generation.startswith("transformers refuses to write the configuration of this model: Generation")
        assert "`temperature`: `do_sample` is not set to `True`" in generation


def load_with_tokenizer(folder: Path) -> str:
    """Load the output of `save_parallelized` into a new model; return the message of a refusal."""
    plan = {"mesh": {"tp": 2}}
    model = meshtrain.parallelize(LlamaForCausalLM.from_pretrained(folder / "stock"), plan)
    model.save_parallelized(folder / "parts")
    again = meshtrain.parallelize(meshtrain.build_model(LlamaConfig(**model.config.to_dict())), plan)
    with pytest.raises(ModelError) as refused:
        meshtrain.load_weights(again, folder / "parts", enlarge_vocabulary=True)
    meshtrain.load_weights(again, folder / "parts")
    meshtrain.save_pretrained(again, folder / "again")
    return str(refused.value)


def test_tokenizer_of_the_loaded_folder_is_saved_with_the_weights(tmp_path: Path) -> None:
    write_llama(tmp_path / "stock")
    answers = run_on_ranks(2, load_with_tokenizer, tmp_path, joins=False)
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (tmp_path / "stock" / "tokenizer.json").read_bytes()
    parts = tmp_path / "parts"
    expected = (
        f"{parts} is a checkpoint, whose tensors are read as they are, but enlarge_vocabulary = True adds rows; "
        f"run `meshtrain merge {parts} OUT`, and load OUT"
    )
    assert answers == [expected] * 2


def classifier() -> OPTForSequenceClassification:
    torch.manual_seed(0)
    return OPTForSequenceClassification(tiny_config("opt"))


def save_classifier(folder: Path) -> None:
    model = meshtrain.parallelize(classifier(), {"mesh": {"dp_shard": 2}}, prove_unknown_class=False)
    meshtrain.save_pretrained(model, folder / "first")
    meshtrain.load_weights(model, folder / "first")
    meshtrain.save_pretrained(model, folder / "second")


def test_classifier_is_saved_and_loaded_again(tmp_path: Path) -> None:
    run_on_ranks(2, save_classifier, tmp_path, joins=False)
    classifier().save_pretrained(tmp_path / "stock")
    for name in ("first", "second"):
        assert_same(tmp_path / name, tmp_path / "stock")


def test_model_that_is_not_parallel_is_refused(tmp_path: Path) -> None:
    for save in (meshtrain.save_pretrained, meshtrain.save_parallelized):
        with pytest.raises(
            ModelError, match=r"a GPT2LMHeadModel is not a parallel model; pass what meshtrain.parallelize"
        ):
            save(gpt2(), tmp_path / "out")


def refuse_different_formats(folder: Path) -> str:
    model = parallel(stock_model("llama-untied"), {"tp": 2})
    dtype = torch.float32 if torch.distributed.get_rank() else torch.bfloat16
    with pytest.raises(CheckpointError) as error:
        meshtrain.save_pretrained(model, folder, dtype=dtype)
    return str(error.value)


def test_different_formats_on_ranks_are_refused(tmp_path: Path) -> None:
    for text in run_on_ranks(2, refuse_different_formats, tmp_path / "saved"):
        assert text == (
            "save_pretrained: dtype is bfloat16 on rank 0 and float32 on rank 1; all ranks make this call together; "
            "pass the same on all of them"
        )
    assert not (tmp_path / "saved").exists()
