"""Pretrained weights on real meshes, from files that transformers wrote."""

import json
import os
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from meshtrain.errors import ModelError
from meshtrain.models.build import stock_like
from meshtrain.models.fused import FusedParameter
from meshtrain.models.layout import local_tensor
from meshtrain.models.weights.block_reader import BOUNCE_BYTES
from meshtrain.models.weights.load import load_shards
from meshtrain.models.weights.safetensors_files import INDEX_NAME, SINGLE_NAME, find_tensors, read_header
from tests.models.gpt2 import FUSED, GPT2
from tests.ranks import run_on_ranks

LLAMA = LlamaConfig(
    vocab_size=13,
    bos_token_id=0,
    eos_token_id=0,
    hidden_size=8,
    intermediate_size=14,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=False,
)


def parameters_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return our parameters of a stock model: FQN -> value, fused parameters in parts."""
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for entry in FUSED:
        values |= entry.split(values.pop(entry.name))
    return values


def shard(values: Mapping[str, Tensor], dp: int, tp: int) -> dict[str, Tensor]:
    """Shard as tensor parallelism and FSDP2 do, rows and columns in turn."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    module = nn.Module()
    for index, (name, value) in enumerate(values.items()):
        placement = Shard(index % value.dim())
        parameter = nn.Parameter(distribute_tensor(value.clone(), mesh["tp"], [placement]))
        module.register_parameter(name.replace(".", "/"), parameter)
    fully_shard(module, mesh=mesh["dp"])
    return {name.replace("/", "."): parameter for name, parameter in module.named_parameters()}


def meta_gpt2(config: GPT2Config = GPT2) -> GPT2LMHeadModel:
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def load_gpt2(source: Path, parameters: Mapping[str, Tensor], stock: PreTrainedModel | None = None) -> None:
    load_shards(parameters, source, fused=FUSED, stock=stock or meta_gpt2())


class Single(PreTrainedModel):
    """A model of one parameter."""

    config: PretrainedConfig

    def __init__(self, name: str, *shape: int) -> None:
        super().__init__(PretrainedConfig())
        owner, _, kind = name.rpartition(".")
        module = nn.Module() if owner else self
        module.register_parameter(kind, nn.Parameter(torch.empty(shape, device="meta")))
        if owner:
            self.add_module(owner, module)
        self.post_init()

    def get_input_embeddings(self) -> None:
        return None


def load_on(source: Path, values: dict[str, Tensor], dp: int, tp: int) -> bool:
    wanted = shard(values, dp, tp)
    parameters = shard({name: torch.zeros_like(value) for name, value in values.items()}, dp, tp)
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    load_gpt2(source, parameters)
    return all(torch.equal(local_tensor(parameters[name]), local_tensor(wanted[name])) for name in wanted)


def load_stage(source: Path, values: dict[str, Tensor]) -> bool:
    first = {name for name in values if ".wte." in name or ".wpe." in name or ".h.0." in name}
    wanted = {name: value for name, value in values.items() if (name in first) == (dist.get_rank() == 0)}
    if dist.get_rank() == 1:
        wanted["lm_head.weight"] = values["transformer.wte.weight"]
    parameters = {name: torch.zeros_like(value) for name, value in wanted.items()}
    load_gpt2(source, parameters)
    return all(torch.equal(parameters[name], wanted[name]) for name in wanted)


def raised(fn: Callable[[], object]) -> tuple[str, ...]:
    try:
        fn()
    except ModelError as error:
        return error.lines
    return ()


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2)


@pytest.fixture
def source(gpt2: GPT2LMHeadModel, tmp_path: Path) -> Path:
    gpt2.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 1), (3, 2)])
def test_every_mesh_reads_its_slices(source: Path, gpt2: GPT2LMHeadModel, dp: int, tp: int) -> None:
    assert all(run_on_ranks(dp * tp, load_on, source, parameters_of(gpt2), dp, tp))


def test_files_of_the_base_model_and_in_shards_are_read(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    gpt2.transformer.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert "wte.weight" in json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(run_on_ranks(2, load_stage, tmp_path, parameters_of(gpt2)))


def test_single_file_wins_over_shards_as_in_transformers(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    other = GPT2LMHeadModel(GPT2)
    assert not torch.equal(other.transformer.wte.weight, gpt2.transformer.wte.weight)
    other.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    gpt2.save_pretrained(tmp_path / "whole")
    shutil.copytree(tmp_path / "shards", tmp_path / "whole", dirs_exist_ok=True)
    assert (tmp_path / "whole" / INDEX_NAME).is_file()
    assert {*find_tensors(tmp_path / "whole").values()} == {*read_header(tmp_path / "whole" / SINGLE_NAME).values()}
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(found.transformer.wte.weight, gpt2.transformer.wte.weight)


def test_each_stage_reads_its_weights_and_a_tied_head_reads_the_embedding(source: Path, gpt2: GPT2LMHeadModel) -> None:
    assert all(run_on_ranks(2, load_stage, source, parameters_of(gpt2)))


def test_values_are_cast_to_the_parameter(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LLAMA).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    parameters = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    load_shards(parameters, tmp_path, fused=(), stock=stock_like(model))
    assert all(torch.equal(parameters[name], parameter.float()) for name, parameter in model.named_parameters())


def test_tied_head_and_old_buffers_in_the_file_are_ignored(source: Path, gpt2: GPT2LMHeadModel) -> None:
    path, wanted = source / "model.safetensors", parameters_of(gpt2)
    old = {"lm_head.weight": wanted["transformer.wte.weight"].clone(), "transformer.h.0.attn.bias": torch.ones(1)}
    old |= {
        "transformer.h.0.attn.masked_bias": torch.ones(()),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1),
    }
    save_file(load_file(path) | old, path, metadata={"format": "pt"})
    parameters = {name: torch.zeros_like(value) for name, value in wanted.items()}
    load_gpt2(source, parameters)
    assert all(torch.equal(parameters[name], wanted[name]) for name in wanted)


def load_different_head(source: Path, values: dict[str, Tensor]) -> tuple[str, ...]:
    held = {"transformer.wte.weight": values["transformer.wte.weight"]}
    if dist.get_rank() == 1:
        held = {"lm_head.weight": values["transformer.wte.weight"]}
    return raised(lambda: load_gpt2(source, {name: torch.zeros_like(value) for name, value in held.items()}))


def test_different_head_in_the_files_of_a_tied_model_is_refused(source: Path, gpt2: GPT2LMHeadModel) -> None:
    path, values = source / "model.safetensors", parameters_of(gpt2)
    head = values["transformer.wte.weight"].clone()
    head[-1, -1] += 1
    save_file(load_file(path) | {"lm_head.weight": head}, path, metadata={"format": "pt"})
    untied = GPT2LMHeadModel.from_pretrained(source)
    assert torch.equal(untied.lm_head.weight, head), "transformers does not tie it either"
    first, second = run_on_ranks(2, load_different_head, source, values)
    assert first == second
    assert first == (
        f"{source} has different values for lm_head.weight and transformer.wte.weight, but the configuration ties "
        "them; from_pretrained would not tie them: set config.tie_word_embeddings = False (under "
        "model.config in a run file)",
    )
    parameters = {name: torch.zeros_like(value) for name, value in untied.named_parameters()}
    config = GPT2Config(**{**GPT2.to_dict(), "tie_word_embeddings": False})
    load_shards(parameters, source, fused=(), stock=meta_gpt2(config))
    assert all(torch.equal(parameters[name], value) for name, value in untied.named_parameters())


def test_tied_weight_is_read_from_its_other_name(source: Path, gpt2: GPT2LMHeadModel) -> None:
    path, wanted = source / "model.safetensors", parameters_of(gpt2)
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    parameters = {name: torch.zeros_like(value) for name, value in wanted.items()}
    load_gpt2(source, parameters)
    assert all(torch.equal(parameters[name], wanted[name]) for name in wanted)
    assert torch.equal(GPT2LMHeadModel.from_pretrained(source).transformer.wte.weight, wanted["transformer.wte.weight"])
    del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    assert raised(lambda: load_gpt2(source, parameters))[0] == (
        f"{source} lacks weights of the model (1): transformer.wte.weight"
    )


def test_scalar_is_read(tmp_path: Path) -> None:
    save_file({"scale": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    parameters = {"scale": torch.zeros(())}
    load_shards(parameters, tmp_path, fused=(), stock=Single("scale"))
    assert parameters["scale"] == 3


def load_other(source: Path) -> tuple[str, ...]:
    stock = meta_gpt2()
    stock.transformer.wpe = nn.Embedding(9, 10, device="meta")
    stock.transformer.h[0].attn.c_attn.weight = nn.Parameter(torch.empty(10, 36, device="meta"))
    stock.transformer.h[1].mlp.c_fc.bias = None
    stock.transformer.h.append(nn.Module())
    stock.transformer.h[2].ln_1 = nn.LayerNorm(10, bias=False, device="meta")
    return raised(lambda: load_gpt2(source, {}, stock))


def test_files_of_another_model_are_refused_on_all_ranks(source: Path) -> None:
    first, second = run_on_ranks(2, load_other, source)
    assert first == second
    assert first == (
        f"{source} lacks weights of the model (1): transformer.h.2.ln_1.weight",
        f"{source} holds weights that the model does not have (1): transformer.h.1.mlp.c_fc.bias",
        f"{source} has weights of other shapes (2): transformer.wpe.weight is (7, 10) in the files and (9, 10) in the "
        "model, transformer.h.0.attn.c_attn.weight is (10, 30) in the files and (10, 36) in the model",
        "use the configuration that belongs to these weights, or other weights",
    )


def load_with_one_bad_folder(source: Path) -> tuple[str, ...]:
    return raised(lambda: load_gpt2(source / ("." if dist.get_rank() == 0 else "nowhere"), {}))


def test_unreadable_files_on_one_rank_stop_all(source: Path) -> None:
    first, second = run_on_ranks(2, load_with_one_bad_folder, source)
    assert first == second
    assert first == (f"{source}/nowhere is not a directory; use a local Hugging Face directory with model.safetensors",)


def refusal(source: Path) -> str:
    (problem,) = raised(lambda: load_gpt2(source, {"transformer.wte.weight": torch.zeros(13, 10)}))
    return problem


def test_directories_without_usable_files_are_refused(source: Path) -> None:
    path, index = source / "model.safetensors", source / "model.safetensors.index.json"
    os.truncate(path, path.stat().st_size - 1)
    assert refusal(source).startswith(f"{path} cannot be read (")
    assert refusal(source).endswith("it may be truncated, so download it again")
    path.unlink()
    path.symlink_to("blob")
    assert refusal(source) == f"{path} is a link to blob, which does not exist; download the model again"
    path.unlink()
    assert refusal(source) == (
        f"{source} has neither model.safetensors nor model.safetensors.index.json; use a directory that holds the "
        "weights"
    )
    (source / "pytorch_model-00001-of-00002.bin").write_text("")
    assert refusal(source).startswith(f"{source} has its weights in pytorch_model.bin, a pickle; convert it")
    index.write_text("[]")
    assert refusal(source).startswith(f"{index} is not an index of safetensors files (it has no table weight_map")
    index.write_text('{"weight_map": {"wte.weight": "a.safetensors", "wpe.weight": "b.safetensors"}}')
    assert (
        refusal(source)
        == f"{index} names files that are not there: a.safetensors, b.safetensors; download the model again"
    )
    for name in ("a", "b"):
        save_file({"other": torch.ones(1)}, source / f"{name}.safetensors")
    assert (
        refusal(source) == f"{source}/a.safetensors lacks wte.weight, which its index lists; download the model again"
    )


def load_a_slice(source: Path, shape: tuple[int, int], dim: int) -> bool:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    part = torch.zeros([size // 4 if place == dim else size for place, size in enumerate(shape)])
    matrix = DTensor.from_local(part, mesh, [Shard(dim)])
    # Rows are read directly into the parameter, columns through a buffer. There is no memory for a
    # copy of the full tensor.
    allowed_bytes = _data_bytes() + BOUNCE_BYTES + part.nbytes // 2
    resource.setrlimit(resource.RLIMIT_DATA, (allowed_bytes, resource.RLIM_INFINITY))
    load_shards({"weight": matrix}, source, fused=(), stock=Single("weight", *shape))
    return bool((part == dist.get_rank()).all())


def _data_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) * 1024


@pytest.mark.parametrize("dim", [0, 1])
def test_only_the_slices_of_a_rank_are_read(tmp_path: Path, dim: int) -> None:
    shape = (1024, 16 * 1024)
    values = torch.arange(4.0).repeat_interleave(shape[dim] // 4)
    matrix = values[:, None] if dim == 0 else values
    save_file({"weight": matrix.expand(shape).contiguous()}, tmp_path / "model.safetensors")
    assert all(run_on_ranks(4, load_a_slice, tmp_path, shape, dim))


def load_stacked(source: Path, stock: Tensor, dp: int, tp: int) -> bool:
    entry = FusedParameter("layers.experts", ("layers.experts",), 1, stacked=2)
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    wanted = entry.split(stock)["layers.experts"]
    module = nn.Module()
    module.register_parameter(
        "experts", nn.Parameter(distribute_tensor(torch.zeros_like(wanted), mesh["tp"], [Shard(2)]))
    )
    fully_shard(module, mesh=mesh["dp"])
    load_shards({"layers.experts": module.experts}, source, fused=[entry], stock=Single("layers.experts", *stock.shape))
    return torch.equal(module.experts.full_tensor(), wanted)


def test_stacked_parts_are_read_from_their_slices(tmp_path: Path) -> None:
    stock = torch.randn(4, 12, 3)
    save_file({"layers.experts": stock}, tmp_path / "model.safetensors")
    assert all(run_on_ranks(4, load_stacked, tmp_path, stock, 2, 2))


def load_unequal(source: Path, stock: Tensor, dp: int, tp: int) -> bool:
    entry = FusedParameter("layers.qkv", tuple(f"layers.{part}" for part in "qkv"), 0, sizes=(8, 4, 4))
    wanted = shard(entry.split(stock), dp, tp)
    parameters = shard({name: torch.zeros_like(value) for name, value in entry.split(stock).items()}, dp, tp)
    load_shards(parameters, source, fused=[entry], stock=Single("layers.qkv", *stock.shape))
    return all(torch.equal(local_tensor(parameters[name]), local_tensor(wanted[name])) for name in wanted)


def test_unequal_parts_are_read_from_their_slices(tmp_path: Path) -> None:
    stock = torch.randn(16, 6)
    save_file({"layers.qkv": stock}, tmp_path / "model.safetensors")
    assert all(run_on_ranks(4, load_unequal, tmp_path, stock, 2, 2))
