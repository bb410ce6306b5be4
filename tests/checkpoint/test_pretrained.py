"""A mesh writes the Hugging Face folder of stock `save_pretrained`, byte for byte."""

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from meshtrain.checkpoint.huggingface.layout import layout_of, plan_files
from meshtrain.checkpoint.huggingface.pretrained import write_pretrained
from meshtrain.config.mesh import MeshPlan
from meshtrain.errors import CheckpointError
from meshtrain.models.build import stock_like
from meshtrain.verify.parallel import fill as fill_parameters
from tests.allocator import return_freed_memory
from tests.checkpoint.folders import assert_same, pipeline_of, stock_of, tiny_pipeline
from tests.parity import Case
from tests.ranks import run_on_ranks
from tests.tiny import tiny_config

# With small files, a stage ends within a file; with one file, all stages do.
SMALL_FILES = {"max_shard_size": 20_000}
MESHES: list[tuple[Case, dict[str, Any]]] = [
    (Case("gpt2-tied", (2, 1, 1, 2)), SMALL_FILES),
    (Case("gpt2-tied", (2, 1, 1, 2)), {"dtype": torch.bfloat16}),
    (Case("gpt2-odd", (1, 1, 1, 4)), SMALL_FILES),
    (Case("gpt2-odd", (1, 1, 2, 2)), {"dtype": torch.float16}),
    (Case("llama-untied", (1, 1, 2, 2), sequence_parallel=True), SMALL_FILES),
    (Case("llama-tied", (2, 2, 1, 1), schedule="ZBVZeroBubble", stages_per_rank=2, layers=(1, 1, 1, 1)), {}),
]
# One of every file in parallel_plans/families, more with derived rules, two that the hub stores in
# another layout, and two with buffers in their files.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("biogpt", "bloom", "gpt2", "gpt_neo", "gpt_oss", "gptj", "hunyuan_v1_dense")),
    *((name, {}) for name in ("inkling_text", "llama", "mistral", "mpt", "opt", "persimmon", "phi3", "qwen2", "qwen3")),
    *((name, {}) for name in ("stablelm", "mixtral", "qwen3_moe", "deepseek_v3", "apertus")),
    ("codegen", {"n_head": 8, "rotary_dim": 4}),
    ("falcon", {"multi_query": False, "new_decoder_architecture": False}),
    ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
    ("falcon", {"new_decoder_architecture": True}),
    ("gpt_bigcode", {"multi_query": False, "num_key_value_heads": 4}),
    ("gpt_bigcode", {"multi_query": True}),
]
MATRIX = 1024 * 1024 * 4


def save_cases(cases: list[tuple[Case, dict[str, Any]]], folders: Path) -> None:
    for number, (case, options) in enumerate(cases):
        write_pretrained(pipeline_of(case), folders / f"{number}", **options)


def test_every_mesh_writes_the_files_of_stock_save_pretrained(tmp_path: Path) -> None:
    run_on_ranks(4, save_cases, MESHES, tmp_path)
    for number, (case, options) in enumerate(MESHES):
        stock, folder = stock_of(case.model), tmp_path / f"{number}"
        stock.to(options.get("dtype", torch.float64)).save_pretrained(
            tmp_path / f"{number}-stock", max_shard_size=options.get("max_shard_size", "5GB")
        )
        num_files = len([*folder.glob("*.safetensors")])
        assert num_files > 10 if "max_shard_size" in options else num_files == 1
        assert_same(folder, tmp_path / f"{number}-stock")


def small_config(model_type: str, changes: dict[str, Any]) -> PretrainedConfig:
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def save_families(weights: list[Path], folders: Path) -> None:
    for number, source in enumerate(weights):
        values = torch.load(source)
        pipeline = tiny_pipeline(small_config(*FAMILIES[number]), MeshPlan(dp_shard=1, tp=2))
        names = {entry.name for entry in pipeline.fused} | pipeline.parameter_names
        fill_parameters(pipeline, {name: value for name, value in values.items() if name in names})
        for name, buffer in pipeline.saved_buffers():
            buffer.copy_(values[name])
        write_pretrained(pipeline, folders / f"{number}")


def test_every_family_loads_into_the_stock_model_bit_for_bit(tmp_path: Path) -> None:
    stocks, weights = [], []
    for number, (model_type, changes) in enumerate(FAMILIES):
        config = small_config(model_type, changes)
        stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for tensor in (*stock.parameters(), *saved_buffers(stock)):
                tensor.add_(0.01)
        stocks.append(stock)
        weights.append(tmp_path / f"{number}.pt")
        torch.save(stock.state_dict(), weights[-1])
    run_on_ranks(2, save_families, weights, tmp_path / "out")
    for number, stock in enumerate(stocks):
        folder = tmp_path / "out" / f"{number}"
        loaded, report = type(stock).from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), (FAMILIES[number], report)
        wanted = stock.state_dict()
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, wanted[name]), (FAMILIES[number], name)
        stock.save_pretrained(tmp_path / f"{number}-stock")
        file = "model.safetensors"
        assert (folder / file).read_bytes() == (tmp_path / f"{number}-stock" / file).read_bytes(), FAMILIES[number]


def saved_buffers(model: PreTrainedModel) -> list[Tensor]:
    saved = model.state_dict()
    return [buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]


def test_layout_splits_experts_and_keeps_float32_tensors(tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layout = layout_of(stock_like(model, torch.bfloat16))
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in layout.tensors
    assert not any("gate_up_proj" in name for name in layout.tensors)
    assert {name for name, tensor in layout.tensors.items() if tensor.dtype == torch.float32} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)
    }
    assert max(len(group.stock) for group in layout.groups) == 1
    assert max(len(group.hub) for group in layout.groups) == 2 * config.n_routed_experts
    with pytest.raises(CheckpointError, match=r"max_shard_size = 'much' is not a size \(.*\); pass a number of bytes"):
        plan_files(layout, "much")


def save_with(tokenizers: list[Any], folders: Path) -> list[str]:
    pipeline, messages = pipeline_of(Case("gpt2-tied", (2, 1, 1, 1))), []
    for number, (tokenizer, origin) in enumerate(tokenizers):
        try:
            write_pretrained(pipeline, folders / f"{number}", tokenizer=tokenizer, origin=origin)
        except CheckpointError as error:
            messages.append(str(error))
    return messages


class OwnTokenizer:
    """Saves itself like a tokenizer of transformers."""

    def save_pretrained(self, directory: str) -> None:
        (Path(directory) / "tokenizer.json").write_text("own")


def test_tokenizer_is_saved_with_the_weights(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("theirs")
    (source / "model.safetensors").write_text("not a tokenizer")
    given = [(OwnTokenizer(), source), (source, None), (None, source), (None, None), (str(tmp_path / "none"), None)]
    answers = run_on_ranks(2, save_with, given, tmp_path / "out")
    found = [(tmp_path / "out" / f"{number}" / "tokenizer.json") for number in range(4)]
    assert [file.read_text() if file.exists() else None for file in found] == ["own", "theirs", "theirs", None]
    message = f"tokenizer = '{tmp_path}/none' is not a directory with a tokenizer; pass one, or the tokenizer itself"
    assert answers == [[message]] * 2
    assert not (tmp_path / "out" / "4").exists()


def save_badly(folders: list[Path], limited_rank: int) -> list[str]:
    pipeline, messages = pipeline_of(Case("gpt2-tied", (2, 1, 1, 2))), []
    for folder in folders:
        if folder.name == "full" and dist.get_rank() == limited_rank:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError) as caught:
            write_pretrained(pipeline, folder, **SMALL_FILES)
        messages.append(str(caught.value))
    return messages


def test_refused_save_is_a_one_line_error_on_all_ranks_and_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    (tmp_path / "file").touch()
    folders = [tmp_path / "taken", tmp_path / "file" / "below", tmp_path / "full"]
    answers = run_on_ranks(4, save_badly, folders, 2)
    assert answers == answers[:1] * 4
    taken, unwritable, full = answers[0]
    assert taken == f"{folders[0]} exists and is not empty; write into a new folder"
    assert (
        unwritable == f"{folders[1]}: cannot write its lock: Not a directory; make room, or write into another folder"
    )
    assert full == f"cannot write {folders[2]}: File too large; make room or write elsewhere"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "notes.txt", "taken"]


def save_changed(folder: Path) -> str:
    pipeline = pipeline_of(Case("gpt2-tied", (2, 1, 1, 1)))
    for stage in pipeline.stages:
        if stage.is_first:
            del stage.model.transformer.wpe.weight
            stage.model.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(CheckpointError) as caught:
        write_pretrained(pipeline, folder)
    return str(caught.value)


def test_tensors_that_do_not_fit_the_model_are_listed(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, save_changed, tmp_path / "out")
    assert first == second
    assert first.splitlines() == [
        "the parallel model lacks tensors of the model (1): transformer.wpe.weight",
        "the parallel model holds tensors that the model does not have (1): scale",
        "weights and configuration of GPT2LMHeadModel do not belong together",
    ]
    assert not (tmp_path / "out").exists()


def peak_growth(num_layers: int, folder: Path) -> int:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    pipeline = tiny_pipeline(config, MeshPlan(dp_shard=1, tp=2))
    for _, parameter in pipeline.named_parameters():
        torch.nn.init.ones_(parameter)
    return_freed_memory()
    # A first save allocates the memory of the code itself.
    write_pretrained(pipeline, folder / "first")
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    write_pretrained(pipeline, folder / "second")
    return peak_bytes() - before


def peak_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def test_rank_needs_memory_for_one_tensor_at_any_model_size(tmp_path: Path) -> None:
    for num_layers in (1, 4):
        writing, other = run_on_ranks(2, peak_growth, num_layers, tmp_path / f"{num_layers}")
        (file,) = (tmp_path / f"{num_layers}" / "second").glob("*.safetensors")
        assert file.stat().st_size > (1 + 7 * num_layers) * MATRIX
        # One tensor and the received half of it; the other rank sends its half.
        assert writing < 2.5 * MATRIX, num_layers
        assert other < 1.5 * MATRIX, num_layers


def test_index_matches_the_files(tmp_path: Path) -> None:
    run_on_ranks(2, save_cases, [(Case("llama-tied", (1, 1, 1, 2)), {"max_shard_size": "100KB"})], tmp_path)
    folder = tmp_path / "0"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {
        name: (value, file.name) for file in folder.glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert index["weight_map"] == {name: file for name, (_, file) in tensors.items()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value, _ in tensors.values())
    assert max(file.stat().st_size for file in folder.glob("*.safetensors")) < 105_000
