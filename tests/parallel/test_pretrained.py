"""Every kind of mesh loads the files of stock `save_pretrained` bit for bit into its shards."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, PrecisionPlan
from meshtrain.models.build import build_meta_model, stock_class
from meshtrain.models.fused import split_parts
from meshtrain.models.layout import local_ranges, local_tensor
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.pretrained import load_pretrained
from meshtrain.runtime.mesh import init_mesh
from tests.ranks import run_on_ranks
from tests.tiny import tiny_config

# One for each file of parallel_plans/families, more with derived rules, and those with another
# layout on the hub.
FAMILIES = (
    *("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_oss", "gptj", "hunyuan_v1_dense"),
    *("inkling_text", "llama", "mpt", "opt", "persimmon", "phi3", "qwen3", "stablelm", "biogpt"),
)
CONVERTED = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "jamba", "llama4_text", "gpt_neox", "nemotron_h")
# Its heads are stored in four blocks, which tp cannot split.
CHANGES: dict[str, dict[str, int]] = {"codegen": {"n_head": 8, "rotary_dim": 4}}
MESHES = {"tp": {"tp": 2}, "dp_shard x tp": {"dp_shard": 2, "tp": 2}, "pp": {"pp": 2}}


def write(folder: Path, model_type: str) -> Path:
    """Write a tiny model in which no two values are equal, including buffers."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    for name, value in CHANGES.get(model_type, {}).items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict({name: torch.randn_like(value.float()) for name, value in model.state_dict().items()})
    model.tie_weights()
    model.save_pretrained(folder / model_type, max_shard_size="200KB")
    return folder / model_type


def differing_names(folder: Path, degrees: dict[str, int]) -> list[str]:
    """Load a model on this mesh; return the names of tensors unlike in `from_pretrained`."""
    config = AutoConfig.from_pretrained(folder)
    model = build_meta_model(config, dtype=torch.float32, attention="eager")
    wanted = stock_class(model).from_pretrained(folder, dtype=torch.float32).state_dict()
    plan = ParallelPlan(mesh=MeshPlan(**degrees), precision=PrecisionPlan(compute="float32"))
    world_size = torch.distributed.get_world_size()
    plan = resolve_plan(with_family(plan, config.model_type), model, BatchShape(4, 1, 16), world_size)
    mesh = init_mesh(plan.mesh, "cpu")
    pipeline = build_pipeline(model, mesh, plan, micro_batch_size=1, seed=0, device=torch.device("cpu"))
    load_pretrained(pipeline, folder)
    wanted = split_parts(wanted, pipeline.fused)
    held = {**dict(pipeline.named_parameters()), **dict(pipeline.saved_buffers())}
    parts = {name: wanted[name][local_ranges(tensor)] for name, tensor in held.items()}
    return [name for name, tensor in held.items() if not torch.equal(local_tensor(tensor), parts[name])]


def compare(folder: Path, types: Sequence[str], meshes: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    found = {(name, mesh): differing_names(folder / name, MESHES[mesh]) for name in types for mesh in meshes}
    return {case: names for case, names in found.items() if names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("types", [FAMILIES, CONVERTED], ids=["families", "converted"])
def test_every_mesh_holds_the_tensors_of_from_pretrained(folder: Path, types: tuple[str, ...]) -> None:
    for name in types:
        write(folder, name)
    assert run_on_ranks(2, compare, folder, types, ["tp", "pp"]) == [{}, {}]
    assert run_on_ranks(4, compare, folder, types, ["dp_shard x tp"]) == [{}] * 4
