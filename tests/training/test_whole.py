"""Runs that train the language half of a multimodal folder, and write the whole folder back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from meshtrain import console
from meshtrain.checkpoint.dcp.reading import read_metadata, read_tensors
from meshtrain.checkpoint.huggingface.export import export_checkpoint, list_stock_tensors
from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.checkpoint.storage.directory import find_checkpoint
from meshtrain.config.data import TokenizerConfig
from meshtrain.config.plan import PrecisionPlan
from meshtrain.config.run import CheckpointConfig, ModelConfig, RunConfig
from meshtrain.data.cache import Cache
from meshtrain.data.tokens.tokenizer_training import train_tokenizer
from meshtrain.errors import CheckpointError, ModelError
from meshtrain.inference.prompts import Decoding, generate_texts
from meshtrain.runtime.ranks import RankError
from meshtrain.training.report import show_run
from meshtrain.training.resolve import resolve_run
from tests.data.corpora import open_corpus
from tests.ranks import run_on_ranks
from tests.training.runs import Mesh, build_plan, build_run, train_here, write_text
from tests.wholes import VOCABULARY, load_whole, write_whole

# Name of the language model in the whole model, of its head there, and of the first in the half.
PLACES = {
    "gemma3": ("model.language_model", "lm_head"),
    "gemma4": ("model.language_model", "lm_head"),
    "llama4": ("language_model.model", "language_model.lm_head"),
    "mistral3": ("model.language_model", "lm_head"),
    "qwen3_vl": ("model.language_model", "lm_head"),
    "glm4v_moe": ("model.language_model", "lm_head"),
}
FLOAT32 = PrecisionPlan(parameters="float32", compute="float32", reduce="float32")


def run_of(directory: Path, mesh: Mesh = (1, 1, 1, 1), *, path: str = "whole", **values: Any) -> RunConfig:
    plan = build_plan(mesh).model_copy(update={"precision": FLOAT32})
    run = build_run(directory / "run", "qwen3", plan, steps=2, checkpoint=CheckpointConfig(every=2))
    model = ModelConfig(path=str(directory / path), weights="pretrained", **values)
    return run.model_copy(update={"model": model})


def write_folder(directory: Path, model_type: str, **options: Any) -> Path:
    """Write a whole model with a tokenizer, as on the hub."""
    corpus = open_corpus(write_text(directory / "text.jsonl"), cache=Cache(directory / "cache"))
    write_whole(directory / "whole", model_type, **options)
    train_tokenizer([corpus], VOCABULARY, Cache(directory / "cache")).copy(directory / "whole")
    return directory / "whole"


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def assert_written_back(directory: Path, model_type: str, out: Path) -> None:
    """Check that a folder has the trained language half, and everything else as it was."""
    before, after = tensors_in(directory / "whole"), tensors_in(out)
    assert before.keys() == after.keys()
    changed = {name for name in before if not equal_bytes(before[name], after[name])}
    assert all("vision" not in name and "visual" not in name and "projector" not in name for name in changed), changed
    assert any("layers.1" in name for name in changed)
    assert {"preprocessor_config.json", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    # The stock class finds every weight, and the half has the values of the run.
    inner, head = PLACES[model_type]
    state = load_whole(out).state_dict()
    for name, value in trained_tensors(directory / "run").items():
        there = f"{inner}.{name.removeprefix('model.')}" if name.startswith("model.") else f"{head}.weight"
        assert torch.equal(state[there], value), name


def trained_tensors(run: Path) -> dict[str, Tensor]:
    """Return the tensors of the causal LM in the newest checkpoint of a run, by stock name."""
    checkpoint = find_checkpoint(run)
    metadata, full = read_metadata(checkpoint), {}
    for name, tensor in list_stock_tensors(checkpoint, metadata, read_manifest(checkpoint)).items():
        full[name] = torch.empty(tensor.shape)
        read_tensors(checkpoint, metadata, {f"model.{part}": view for part, view in tensor.views(full[name]).items()})
    return full


@pytest.mark.parametrize(
    ("model_type", "mesh"),
    [
        ("gemma3", (2, 1, 1, 2)),
        ("gemma4", (2, 1, 1, 1)),
        ("llama4", (1, 1, 1, 2)),
        ("mistral3", (1, 1, 2, 1)),
        ("qwen3_vl", (2, 1, 1, 2)),
        ("glm4v_moe", (2, 1, 2, 1)),
    ],
)
def test_folder_is_trained_on_a_mesh_and_written_back(model_type: str, mesh: Mesh, tmp_path: Path) -> None:
    write_folder(tmp_path, model_type)
    pp, dp_replicate, dp_shard, tp = mesh
    run_on_ranks(pp * dp_replicate * dp_shard * tp, train_here, run_of(tmp_path, mesh), joins=False)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert_written_back(tmp_path, model_type, tmp_path / "out")
    assert (tmp_path / "out/config.json").read_text() == (tmp_path / "whole/config.json").read_text()


def train(run: RunConfig) -> None:
    run_on_ranks(1, train_here, run, joins=False)


def test_folder_of_several_files_with_other_names_keeps_names_and_formats(tmp_path: Path) -> None:
    whole = write_folder(tmp_path, "gemma3", save_original_format=False)
    old = load_file(whole / "model.safetensors")
    # Names of the modules, a head beside the embedding that it is tied to, and a vision tower in
    # another number format.
    tensors = {name: tensor.bfloat16() if "vision" in name else tensor for name, tensor in old.items()}
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    names = sorted(tensors)
    (whole / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, whole / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[number::3], file)
    (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    train(run_of(tmp_path))
    export_checkpoint(tmp_path / "run", tmp_path / "out", max_shard_size="60KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_written_back(tmp_path, "gemma3", tmp_path / "out")
    after = tensors_in(tmp_path / "out")
    assert torch.equal(after["lm_head.weight"], after["model.language_model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], tensors["lm_head.weight"])


def test_enlarged_vocabulary_is_in_the_configuration_of_the_whole_model(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen3_vl")
    run = run_of(tmp_path, enlarge_vocabulary=True)
    tokenizer = TokenizerConfig(path=str(tmp_path / "whole"), special_tokens=["<|new|>"])
    train(run.model_copy(update={"data": run.data.model_copy(update={"tokenizer": tokenizer})}))
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    model = load_whole(tmp_path / "out")
    assert model.config.text_config.vocab_size == VOCABULARY + 1
    assert model.get_input_embeddings().weight.shape[0] == VOCABULARY + 1
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("<|new|>") == VOCABULARY
    # Generation loads the folder too, with the Auto class of its type.
    decoding = Decoding(3, temperature=0.0)
    assert generate_texts(str(tmp_path / "out"), ["model reads"], decoding)[0].startswith("model reads")


def test_changed_and_missing_folders_are_refused(tmp_path: Path) -> None:
    whole = write_folder(tmp_path, "mistral3")
    run = run_of(tmp_path)
    train(run)
    with pytest.raises(CheckpointError, match=r"--dtype bfloat16 is for a model that is written alone.*leave it out"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    # A run that starts from the checkpoint trains and exports the same half.
    other = run_of(tmp_path, path="run/checkpoints/step-2").model_copy(update={"run_directory": str(tmp_path / "b")})
    train(other)
    export_checkpoint(tmp_path / "b", tmp_path / "out-b")
    load_whole(tmp_path / "out-b")

    train(run.model_copy(update={"steps": 4}))
    file = whole / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"whole, the folder of the Mistral3For.* has changed since the run began; put"
    ):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    with pytest.raises(RankError, match=r"config\.whole_model is .* in the checkpoint and .* in this run"):
        train(run.model_copy(update={"steps": 6}))
    shutil.rmtree(whole)
    with pytest.raises(ModelError, match=r"whole, the folder of the Mistral3ForConditionalGeneration .* is gone; put"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_head_of_the_run_says_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path, "gemma3")
    console.configure(rank=0)
    show_run(resolve_run(run_of(tmp_path)))
    assert (
        "Only the language half of Gemma3ForConditionalGeneration is trained, on text: model.language_model "
        in " ".join(capsys.readouterr().out.split())
    )
