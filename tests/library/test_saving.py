"""Weights out of a user's own parallel model."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel, OPTForSequenceClassification

import meshtrain
from meshtrain.checkpoint.export import merge
from meshtrain.errors import ModelError
from meshtrain.models.build import load_hf_config
from meshtrain.verify.tiny import tiny_config
from tests.checkpoint.folders import assert_same
from tests.parity import MODELS
from tests.ranks import run_on_ranks


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
    meshtrain.save_pretrained(again, folder / "again")


def test_a_users_model_is_saved_as_the_stock_one_would_be(tmp_path: Path) -> None:
    run_on_ranks(2, save_gpt2, tmp_path, joins=False)
    merge(tmp_path / "parts", tmp_path / "merged")
    stock = gpt2()
    stock.save_pretrained(tmp_path / "stock")
    for name in ("method", "merged", "again"):
        assert_same(tmp_path / name, tmp_path / "stock")
    stock.float().save_pretrained(tmp_path / "float32", max_shard_size="50KB")
    assert_same(tmp_path / "function", tmp_path / "float32")


def classifier() -> OPTForSequenceClassification:
    torch.manual_seed(0)
    return OPTForSequenceClassification(tiny_config("opt"))


def save_classifier(folder: Path) -> None:
    model = meshtrain.parallelize(classifier(), {"mesh": {"dp_shard": 2}})
    meshtrain.save_pretrained(model, folder / "first")
    meshtrain.load_weights(model, folder / "first")
    meshtrain.save_pretrained(model, folder / "second")


def test_another_head_is_saved_too_and_loaded_again(tmp_path: Path) -> None:
    run_on_ranks(2, save_classifier, tmp_path, joins=False)
    classifier().save_pretrained(tmp_path / "stock")
    for name in ("first", "second"):
        assert_same(tmp_path / name, tmp_path / "stock")


def test_a_model_that_is_not_parallel_is_refused(tmp_path: Path) -> None:
    for save in (meshtrain.save_pretrained, meshtrain.save_parallelized):
        with pytest.raises(
            ModelError, match=r"a GPT2LMHeadModel is no parallel model; give what meshtrain.parallelize"
        ):
            save(gpt2(), tmp_path / "out")
