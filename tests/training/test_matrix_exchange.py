"""Matrices whose parts are anywhere are changed as a whole, each of them once."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from meshtrain.config.mesh import DP_REPLICATE, DP_SHARD, EP, TP, MeshPlan
from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.cut.cutter import cut
from meshtrain.parallel.matrices import hidden_matrices
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training import matrix_exchange
from meshtrain.training.matrix_exchange import MatrixExchange
from tests.ranks import run_on_ranks

Layout = tuple[tuple[int, ...], tuple[str, ...], tuple[Placement, ...]]
MESHES: dict[str, tuple[MeshPlan, list[Layout]]] = {
    "sharded, over tp": (
        MeshPlan(dp_shard=2, tp=2),
        [
            ((7, 5), (DP_SHARD, TP), (Shard(0), Shard(1))),
            ((5, 4), (DP_SHARD,), (Shard(0),)),
            ((6, 5), (TP,), (Shard(1),)),
            ((3, 2, 4, 6), (DP_SHARD, TP), (Shard(0), Shard(2))),
            # One process has no row.
            ((1, 9), (DP_SHARD,), (Shard(0),)),
        ],
    ),
    "copied": (
        MeshPlan(dp_replicate=2, dp_shard=2),
        [((size, 6), (DP_REPLICATE, DP_SHARD), (Replicate(), Shard(1))) for size in (4, 5, 9)],
    ),
    "whole experts": (MeshPlan(dp_shard=2, ep=2), [((4, 3, 5), (EP,), (Shard(0),)), ((6, 3), (), ())]),
}


def doubled(matrices: Tensor) -> Tensor:
    """Return something that depends on all numbers of a matrix."""
    return matrices * matrices.sum((1, 2), keepdim=True)


def exchange_here(plan: MeshPlan, layouts: list[Layout], step: int) -> tuple[list[Tensor], int]:
    """Return the changed parameters in full, and how many matrices this rank has computed."""
    matrix_exchange.ROUND = step
    mesh, computed = init_mesh(plan, "cpu"), 0

    def count(matrices: Tensor) -> Tensor:
        nonlocal computed
        computed += len(matrices)
        return doubled(matrices)

    fulls = [_laid_out(mesh, shape, *layout) for shape, *layout in layouts]
    values = {nn.Parameter(local_tensor(full).clone()): full for full in fulls}
    exchange = MatrixExchange(values, mesh)
    exchange.replace({parameter: local_tensor(full) for parameter, full in values.items()}, count)
    return [full.full_tensor() if isinstance(full, DTensor) else full for full in fulls], computed


def _laid_out(mesh: DeviceMesh, shape: tuple[int, ...], axes: tuple[str, ...], where: tuple[Placement, ...]) -> Tensor:
    full = _values(shape)
    return distribute_tensor(full, mesh[axes], where, src_data_rank=None) if axes else full


def _values(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("step", [1, matrix_exchange.ROUND], ids=["one by one", "together"])
@pytest.mark.parametrize("name", MESHES)
def test_each_matrix_is_changed_once_and_as_a_whole(name: str, step: int) -> None:
    plan, layouts = MESHES[name]
    answers = run_on_ranks(plan.world_size, exchange_here, plan, layouts, step)
    wholes = [_values(shape).view(-1, *shape[-2:]) for shape, _, _ in layouts]
    assert sum(computed for _, computed in answers) == sum(map(len, wholes))
    assert max(computed for _, computed in answers) < sum(map(len, wholes))
    for found, _ in answers:
        for whole, one in zip(wholes, found, strict=True):
            torch.testing.assert_close(one.view(whole.shape), doubled(whole), rtol=1e-14, atol=0)


TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
ATTENTION = [f"self_attn.{one}_proj.weight" for one in "qkvo"]


@pytest.mark.parametrize(
    ("model_type", "inside"),
    [
        # Its experts have biases.
        ("gpt_oss", ["mlp.router.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ("mixtral", ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ("llama", [f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")]),
    ],
)
def test_matrices_are_those_of_the_layers(model_type: str, inside: list[str]) -> None:
    config = {**TINY, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16, "head_dim": 4}
    if model_type != "llama":
        config |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    hf_config = load_hf_config(ModelConfig(type=model_type, config=config))
    model = build_meta_model(hf_config, dtype=torch.float32, attention="eager")
    (stage,) = cut(model, [1], [0])
    assert hidden_matrices(stage) == {f"model.layers.0.{name}" for name in (*ATTENTION, *inside)}
