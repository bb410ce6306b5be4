"""Convert weights to and from Hugging Face folders, and start new runs from them."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from meshtrain.checkpoint.huggingface.convert import convert
from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.checkpoint.storage.integrity import find_damage
from meshtrain.checkpoint.storage.location import open_location
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.errors import CheckpointError, ModelError, UserError
from tests.models.gpt2 import GPT2
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, steps_of, train_here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a Hugging Face folder of a GPT-2 with fused projections and a tied head."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(GPT2), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "stock"


def test_convert_from_a_folder_to_a_checkpoint_and_back(folder: Path, tmp_path: Path) -> None:
    run_on_ranks(1, convert, folder, tmp_path / "checkpoint", joins=False)
    checkpoint = tmp_path / "checkpoint" / "step-0"
    assert find_damage(checkpoint) == []
    assert read_manifest(checkpoint).dtype == "bfloat16"
    assert read_manifest(checkpoint).architecture == "GPT2LMHeadModel"
    assert (checkpoint / "huggingface" / "tokenizer_config.json").is_file()
    assert not list((checkpoint / "huggingface").glob("*.safetensors*"))
    convert(checkpoint, tmp_path / "back")
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_convert_on_several_ranks_keeps_the_weights(folder: Path, tmp_path: Path) -> None:
    run_on_ranks(2, convert, folder, tmp_path / "two", joins=False)
    convert(tmp_path / "two", tmp_path / "back")
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(CheckpointError, match=r"two/step-0 exists; convert into another directory"):
        convert(folder, tmp_path / "two")


def test_broken_folder_is_named_and_no_output_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").write_bytes(b"broken")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match=r"stock"):
        convert(folder, tmp_path / "checkpoint")
    dist.destroy_process_group()
    assert list((tmp_path / "here").iterdir()) == []
    assert not (tmp_path / "checkpoint").exists()


def test_unsupported_source_or_target_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no manifest.json and no step-N directory"):
        convert(tmp_path, tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"memory://out is a URL, but a Hugging Face folder is written to a local"
    ):
        convert(tmp_path, open_location("memory://out"))


def test_dtype_is_for_folders_only(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--dtype float32 is for what is written as a Hugging Face folder, and "):
        convert(folder, tmp_path / "checkpoint", dtype="float32")
    run_on_ranks(1, convert, folder, tmp_path / "checkpoint", joins=False)
    convert(tmp_path / "checkpoint", tmp_path / "back", dtype="float32")
    weights = load_file(tmp_path / "back" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}


def losses(config: RunConfig) -> list[float]:
    run_on_ranks(config.plan.mesh.pp * config.plan.mesh.tp, train_here, config, joins=False)
    return [step["loss"] for step in steps_of(Path(config.run_directory))]


def test_run_starts_from_the_weights_alone_of_another_run(tmp_path: Path) -> None:
    first = build_run(tmp_path / "first", "gpt2", build_plan((2, 1, 1, 2)))
    losses(first)
    checkpoint = tmp_path / "first" / "checkpoints" / "step-6"
    # The other runs use another mesh, and start from the checkpoint and from its exported model.
    convert(checkpoint, tmp_path / "exported")
    begun = []
    for name, path in (("warm", checkpoint), ("stock", tmp_path / "exported")):
        model = ModelConfig(path=str(path), weights="pretrained")
        run = build_run(tmp_path / name, "gpt2", build_plan((1, 1, 1, 2)), steps=2)
        begun.append(losses(run.model_copy(update={"model": model})))
    assert begun[0] == begun[1]
    fresh = losses(build_run(tmp_path / "fresh", "gpt2", build_plan((1, 1, 1, 2)), steps=2))
    assert begun[0][0] < fresh[0]


def test_run_from_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    first = build_run(tmp_path / "first", "gpt2", build_plan((1, 1, 1, 1)), steps=1)
    losses(first)
    checkpoint = tmp_path / "first" / "checkpoints" / "step-1"
    (checkpoint / "__0_0.distcp").unlink()
    model = ModelConfig(path=str(checkpoint), weights="pretrained")
    warm = build_run(tmp_path / "warm", "gpt2", build_plan((1, 1, 1, 1))).model_copy(update={"model": model})
    with pytest.raises(AssertionError) as caught:
        losses(warm)
    original = caught.value.original  # type: ignore[attr-defined]
    assert isinstance(original, UserError)
    assert original.lines == (f"{checkpoint}/__0_0.distcp is missing; use another checkpoint",)
    assert json.loads((checkpoint / "manifest.json").read_text())["step"] == 1
