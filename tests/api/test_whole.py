"""A program that trains the language half of a multimodal folder, and saves the whole folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import meshtrain
from meshtrain.checkpoint.huggingface.export import merge
from meshtrain.errors import CheckpointError
from tests.ranks import run_on_ranks
from tests.wholes import load_whole, write_whole


def add_one_and_save(folder: str, out: str, parts: str) -> None:
    model = meshtrain.build_model(folder)
    model = meshtrain.parallelize(model, {"mesh": {"pp": 2, "tp": 2}}, prove_unknown_class=False)
    meshtrain.load_weights(model, folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with pytest.raises(CheckpointError, match=r"dtype = torch.bfloat16 is for a model that is written alone.*leave it"):
        meshtrain.save_pretrained(model, out, dtype="bfloat16")
    meshtrain.save_pretrained(model, out, max_shard_size="2MB")
    meshtrain.save_parallelized(model, parts)


def test_language_half_is_saved_within_the_whole_folder(tmp_path: Path) -> None:
    write_whole(tmp_path / "whole", "qwen3_vl")
    run_on_ranks(4, add_one_and_save, *(str(tmp_path / name) for name in ("whole", "out", "parts")))
    merge(tmp_path / "parts", tmp_path / "merged")
    before = load_file(tmp_path / "whole/model.safetensors")
    expected = {name: value + ("language_model" in name) for name, value in before.items()}
    for name in ("out", "merged"):
        files = sorted((tmp_path / name).glob("*.safetensors"))
        after = {key: value for file in files for key, value in load_file(file).items()}
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], expected[key]) for key in after), name
        assert (tmp_path / name / "preprocessor_config.json").is_file()
        load_whole(tmp_path / name)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
