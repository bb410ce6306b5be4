"""Export checkpoints to folders that stock transformers loads, bit for bit."""

import json
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from meshtrain.checkpoint.dcp.store import HuggingFace, write_checkpoint
from meshtrain.checkpoint.huggingface import export
from meshtrain.checkpoint.huggingface.export import ORIGINAL, export_checkpoint
from meshtrain.checkpoint.manifest import Manifest, read_manifest, write_manifest
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.errors import CheckpointError
from meshtrain.models.fused import FusedParameter
from tests.allocator import return_freed_memory
from tests.checkpoint.stages import manifest_of
from tests.models.gpt2 import FUSED, GPT2, TIED
from tests.ranks import run_on_ranks

LLAMA = LlamaConfig(
    vocab_size=40,
    hidden_size=8,
    intermediate_size=14,
    num_hidden_layers=11,
    num_attention_heads=2,
    tie_word_embeddings=True,
)


def tensors_of(model: PreTrainedModel, fused: tuple[FusedParameter, ...] = ()) -> dict[str, Tensor]:
    """Return checkpoint key -> value, and optimizer state that is not to be exported."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for entry in fused:
        values |= entry.split(values.pop(entry.name))
    states = {f"optimizer.exp_avg.{name}": torch.zeros_like(value) for name, value in values.items()}
    return {f"model.{name}": value.contiguous() for name, value in values.items()} | states


def save(
    root: Path, model: PreTrainedModel, step: int = 1, fused: tuple[FusedParameter, ...] = (), **values: object
) -> Path:
    manifest = manifest_of(step, architecture=type(model).__name__, fused=fused, **values)
    tensors = tensors_of(model, fused)
    return write_checkpoint(
        root, tensors, manifest=manifest, huggingface=model.config.save_pretrained, retention=Retention(newest=9)
    )


def save_sharded(root: Path, tensors: Mapping[str, Tensor], manifest: Manifest, huggingface: HuggingFace) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = {
        key: distribute_tensor(tensor, mesh, [Shard(0), Shard(tensor.dim() - 1)]) for key, tensor in tensors.items()
    }
    write_checkpoint(root, sharded, manifest=manifest, huggingface=huggingface, retention=Retention(newest=1))


def check_loads(folder: Path, model: PreTrainedModel) -> None:
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded) is type(model)
    wanted = model.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    for name, value in loaded.state_dict().items():
        assert value.dtype == wanted[name].dtype
        assert torch.equal(value, wanted[name]), name


def test_fused_parts_are_joined_equally_on_any_mesh(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2)
    manifest = manifest_of(1, architecture="GPT2LMHeadModel", fused=FUSED, tied=TIED)
    save(tmp_path / "one", model, fused=FUSED)
    writes = model.config.save_pretrained
    run_on_ranks(4, save_sharded, tmp_path / "four", tensors_of(model, FUSED), manifest, writes)
    for name in ("one", "four"):
        export_checkpoint(tmp_path / name / "step-1", tmp_path / f"{name}-exported")
        check_loads(tmp_path / f"{name}-exported", model)
    first, second = ((tmp_path / f"{name}-exported" / "model.safetensors").read_bytes() for name in ("one", "four"))
    assert first == second


def test_unequal_parts_and_stacked_experts_are_joined(tmp_path: Path) -> None:
    sizes = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    phi3 = Phi3ForCausalLM(Phi3Config(**sizes, **heads))
    name = "model.layers.0.self_attn.qkv_proj"
    qkv = FusedParameter(f"{name}.weight", tuple(f"{name}.{part}.weight" for part in "qkv"), 0, sizes=(8, 4, 4))
    mixtral = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    experts = FusedParameter(name, (name,), 1, stacked=2)
    for model, fused in ((phi3, qkv), (mixtral, experts)):
        root = tmp_path / type(model).__name__
        save(root, model, fused=(fused,))
        export_checkpoint(root / "step-1", root / "exported")
        check_loads(root / "exported", model)


def test_tied_head_is_omitted_and_files_are_split(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LLAMA).to(torch.bfloat16)
    in_float32 = LlamaForCausalLM(LLAMA)
    in_float32.load_state_dict(model.state_dict())
    save(tmp_path, in_float32, tied={"lm_head.weight": "model.embed_tokens.weight"}, dtype="bfloat16")
    folder = tmp_path / "a" / "b"
    export_checkpoint(tmp_path / "step-1", folder, max_shard_size=3000)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())
    assert "lm_head.weight" not in index["weight_map"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    check_loads(folder, model)


def test_weights_keep_their_own_number_formats(tmp_path: Path) -> None:
    save(tmp_path, LlamaForCausalLM(LLAMA), dtype="bfloat16", dtypes={"model.norm.weight": "float32"})
    export_checkpoint(tmp_path / "step-1", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name, value in weights.items() if value.dtype == torch.float32} == {"model.norm.weight"}


def test_model_trained_in_float32_is_exported_in_its_original_format(tmp_path: Path) -> None:
    config = LlamaConfig(**LLAMA.to_dict() | {"dtype": "bfloat16"})
    saved = save(tmp_path, LlamaForCausalLM(config), tied={"lm_head.weight": "model.embed_tokens.weight"})
    for option, dtype in ((ORIGINAL, "bfloat16"), ("float16", "float16"), ("float32", "float32")):
        export_checkpoint(saved, tmp_path / option, dtype=option)
        weights = load_file(tmp_path / option / "model.safetensors")
        assert {value.dtype for value in weights.values()} == {getattr(torch, dtype)}
        assert json.loads((tmp_path / option / "config.json").read_text())["dtype"] == dtype


def write_own_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "own"}')


def test_class_with_its_own_code_is_exported_with_the_names_of_its_modules(tmp_path: Path) -> None:
    tensors = {"model.layers.0.weight": torch.arange(6.0).view(2, 3), "model.places": torch.arange(4)}
    manifest = manifest_of(1, architecture="OwnForCausalLM", dtype="bfloat16")
    saved = write_checkpoint(
        tmp_path, tensors, manifest=manifest, huggingface=write_own_config, retention=Retention(newest=1)
    )
    export_checkpoint(saved, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == {"layers.0.weight", "places"}
    assert torch.equal(weights["layers.0.weight"], tensors["model.layers.0.weight"].to(torch.bfloat16))
    assert torch.equal(weights["places"], torch.arange(4))


def test_tensors_that_do_not_belong_to_the_model_are_listed(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LLAMA)
    tensors = tensors_of(model)
    tensors["model.extra"] = tensors.pop("model.model.norm.weight")
    tensors["model.model.embed_tokens.weight"] = torch.zeros(3, 8)
    saved = write_checkpoint(
        tmp_path,
        tensors,
        manifest=manifest_of(1),
        huggingface=LLAMA.save_pretrained,
        retention=Retention(newest=1),
    )
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(saved, tmp_path / "out")
    assert caught.value.lines == (
        f"{saved} lacks tensors of the model (1): model.norm.weight",
        f"{saved} holds tensors that the model does not have (1): extra",
        f"{saved} has tensors of other shapes (1): model.embed_tokens.weight (3, 8) instead of (40, 8)",
        "weights and configuration of LlamaForCausalLM do not belong together",
    )
    assert not (tmp_path / "out").exists()


def test_run_directory_exports_its_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 10):
        model = LlamaForCausalLM(LLAMA)
        save(tmp_path / "checkpoints", model, step)
    export_checkpoint(tmp_path, tmp_path / "out")
    check_loads(tmp_path / "out", model)
    text = capsys.readouterr().out
    assert f"{tmp_path}/checkpoints/step-10 is the newest checkpoint" in text
    assert f"{tmp_path}/out holds LlamaForCausalLM of step 10" in text


def test_export_into_an_empty_folder_only(tmp_path: Path) -> None:
    save(tmp_path, LlamaForCausalLM(LLAMA))
    folder = tmp_path / "out"
    folder.mkdir()
    export_checkpoint(tmp_path / "step-1", folder)
    before = sorted(folder.iterdir())
    for taken in (folder, folder / "config.json"):
        with pytest.raises(CheckpointError, match=f"{taken} exists and is not empty; write into a new folder"):
            export_checkpoint(tmp_path / "step-1", taken)
    assert sorted(folder.iterdir()) == before


def test_second_export_into_a_folder_is_refused_during_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, LlamaForCausalLM(LLAMA))
    write_tensors, text = export._write_tensors, []

    def write_after_another_export(*arguments: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            export_checkpoint(tmp_path / "step-1", tmp_path / "out")
        text.append(str(caught.value))
        write_tensors(*arguments)

    monkeypatch.setattr(export, "_write_tensors", write_after_another_export)
    export_checkpoint(tmp_path / "step-1", tmp_path / "out")
    (problem,) = text
    assert problem.startswith(f"{tmp_path}/out is in use by process {os.getpid()} on ")
    assert problem.endswith("; wait until it ends, end it, or write into another folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "step-1"]


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2)
    folder = tmp_path / "out"
    lacking = save(tmp_path, model, 1)
    manifest = manifest_of(1, fused=FUSED[:1], files=read_manifest(lacking).files)
    write_manifest(lacking, manifest)
    with pytest.raises(
        CheckpointError, match=r"step-1 lacks parts that its manifest names: transformer.h.0.attn.c_attn.k"
    ):
        export_checkpoint(lacking, folder)
    bare = write_checkpoint(
        tmp_path, tensors_of(model), manifest=manifest_of(2), huggingface=None, retention=Retention(newest=9)
    )
    with pytest.raises(CheckpointError, match=r"step-2 has no huggingface/config.json; put the model's configuration"):
        export_checkpoint(bare, folder)
    (bare / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"step-2/__0_0.distcp is missing; use another checkpoint"):
        export_checkpoint(bare, folder)
    assert not folder.exists()


def export_on_full_disk(checkpoint: Path, folder: Path) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(checkpoint, folder)
    return str(caught.value)


def test_full_disk_leaves_no_output(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", LlamaForCausalLM(LLAMA))
    folder = tmp_path / "out" / "model"
    (message,) = run_on_ranks(1, export_on_full_disk, saved, folder)
    assert message.startswith(f"cannot write {folder}: ")
    assert "File too large" in message
    assert message.endswith("; make room or write elsewhere")
    assert not (tmp_path / "out").exists()


def peak_growth(checkpoint: Path, folder: Path, max_shard_bytes: int) -> int:
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    export_checkpoint(checkpoint, folder, max_shard_size=max_shard_bytes)
    return _peak_bytes() - before


def _peak_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def test_export_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    growth, bytes_of_matrix = {}, 4 * 1024**2
    for num_layers in (1, 6):
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=1024,
            intermediate_size=1024,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        tensors = {f"model.{name}": torch.ones(value.shape) for name, value in model.named_parameters()}
        saved = write_checkpoint(
            tmp_path,
            tensors,
            manifest=manifest_of(num_layers, tied={"lm_head.weight": "model.embed_tokens.weight"}),
            huggingface=config.save_pretrained,
            retention=Retention(newest=9),
        )
        (growth[num_layers],) = run_on_ranks(1, peak_growth, saved, tmp_path / f"{num_layers}", 4 * bytes_of_matrix)
    # One tensor, its bytes as they were read, and the memory of the code itself.
    assert max(growth.values()) < 10 * bytes_of_matrix, growth
    assert growth[6] < growth[1] + bytes_of_matrix, growth
