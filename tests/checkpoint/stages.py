"""The tensors of a pipeline stage on a real mesh, sharded by torch's own TP and FSDP2."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshtrain.checkpoint.manifest import Manifest

NUM_LAYERS = 4
# No 2, 3 or 4 ranks share these rows evenly; torch's own arithmetic gets 13 wrong.
SHAPES = {
    "colwise.weight": ((13, 6), Shard(0)),
    "colwise.bias": ((13,), Shard(0)),
    "rowwise.weight": ((5, 7), Shard(1)),
    "norm.weight": ((3,), Replicate()),
}
EMBEDDING = "embed.weight"
STATES = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


def build_stage(
    pp: int, dp_replicate: int, dp_shard: int, tp: int, *, filled: bool, scale: int = 1
) -> dict[str, Tensor]:
    """Return key -> tensor on this rank; the tied head of the last stage has the embedding's."""
    mesh = init_device_mesh(
        "cpu", (pp, dp_replicate, dp_shard, tp), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp")
    )
    data_mesh = mesh["dp_replicate", "dp_shard"] if dp_replicate > 1 else mesh["dp_shard"]
    pp_rank = mesh.get_local_rank("pp")
    specs = {
        f"layers.{layer}.{name}": spec
        for layer in range(NUM_LAYERS)
        if layer * pp // NUM_LAYERS == pp_rank
        for name, spec in SHAPES.items()
    }
    if pp_rank in (0, pp - 1):
        specs[EMBEDDING] = ((13, 4), Shard(0))
    tensors = {}
    for state in STATES:
        module = nn.Module()
        for name, (shape, placement) in specs.items():
            value = expected(state + name, shape) * scale if filled else torch.zeros(shape)
            parameter = nn.Parameter(distribute_tensor(value, mesh["tp"], [placement]))
            module.register_parameter(name.replace(".", "/"), parameter)
        fully_shard(module, mesh=data_mesh)
        tensors |= {state + name.replace("/", "."): parameter for name, parameter in module.named_parameters()}
    return tensors


def build_plain(*, filled: bool) -> dict[str, Tensor]:
    """Return the same tensors unsharded, as in a process without a mesh."""
    shapes = {f"layers.{layer}.{name}": shape for layer in range(NUM_LAYERS) for name, (shape, _) in SHAPES.items()}
    shapes[EMBEDDING] = (13, 4)
    return {
        state + name: expected(state + name, shape) if filled else torch.zeros(shape)
        for state in STATES
        for name, shape in shapes.items()
    }


def expected(key: str, shape: tuple[int, ...]) -> Tensor:
    """Return values that depend on the key and the position."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1000 * sum(key.encode())


def manifest_of(step: int, **values: object) -> Manifest:
    """Return the manifest of a plain checkpoint."""
    fields: dict = {
        "seed": 0,
        "global_batch_size": 8,
        "mesh": {"pp": 1},
        "plan_hash": "p",
        "model_type": "llama",
        "architecture": "LlamaForCausalLM",
        "data_identity": "d",
    }
    return Manifest(step=step, **(fields | values))
