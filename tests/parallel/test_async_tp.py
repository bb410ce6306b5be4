"""Messages of sequence parallelism and the products beside them, fused by inductor (`async_tp`)."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from torch._inductor.fx_passes import post_grad
from torch.distributed import _symmetric_memory as symmetric_memory

import meshtrain
from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import ModelConfig
from meshtrain.errors import ConfigError, PlanError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.runtime.mesh import init_mesh
from meshtrain.runtime.process import check_peer_memory
from meshtrain.training.step import train_step
from meshtrain.verify.parallel import build_step_context, local_rows
from meshtrain.verify.shrink import shrink_plan
from tests.parity import GLOBAL_BATCH, LLAMA, batches
from tests.ranks import run_on_ranks

MODEL = ModelConfig(type="llama", config={**LLAMA, "num_hidden_layers": 1})
ASYNC: dict[str, Any] = {
    "mesh": {"tp": 2, "dp_shard": 1},
    "tensor": {"sequence_parallel": True, "async_tp": True},
    "compile": {"enabled": True},
}


def resolved(**tables: Any) -> tuple[ParallelPlan, Any]:
    plan = with_family(ParallelPlan.model_validate({**ASYNC, **tables}), "llama")
    model = build_meta_model(load_hf_config(MODEL), dtype=torch.float32)
    return resolve_plan(plan, model, BatchShape(8, 2, 16), plan.mesh.fixed_degree), model


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"mesh": {"dp_shard": 1}},
            "tensor.async_tp sends the messages of sequence parallelism in pieces, and with mesh.tp = 1 there are "
            "none; leave it out, or set mesh.tp above 1 and tensor.sequence_parallel = true",
        ),
        (
            {"tensor": {"async_tp": True}},
            "tensor.async_tp sends the messages of sequence parallelism in pieces, and with tensor.sequence_parallel = "
            "false there are none; leave it out, or set mesh.tp above 1 and tensor.sequence_parallel = true",
        ),
        (
            {"compile": {}},
            "tensor.async_tp is done by inductor, and with compile.enabled = false it does not run; leave it out, or "
            "set compile.enabled = true and compile.backend = 'inductor'",
        ),
        (
            {"compile": {"enabled": True, "backend": "aot_eager"}},
            "tensor.async_tp is done by inductor, and with compile.backend = 'aot_eager' it does not run; leave it "
            "out, or set compile.enabled = true and compile.backend = 'inductor'",
        ),
        (
            {"precision": {"compute": "float8", "float8": {"skip": []}}},
            "tensor.async_tp with precision.compute = 'float8': inductor finds no products in float8 beside messages, "
            "because their inputs are cast in between; leave one of them out",
        ),
    ],
)
def test_plans_without_anything_to_fuse_are_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolved(**tables)
    assert message in caught.value.lines


def test_processes_without_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as apart:
        check_peer_memory(2)
    assert apart.value.lines == (
        "tensor.async_tp needs all processes of tp = 2 on one machine, and this machine has 1; leave tensor.async_tp "
        "out, or use a tp that divides that number",
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    message = "tensor.async_tp needs GPUs that reach each other's memory, and there are none; leave tensor.async_tp out"
    with pytest.raises(ConfigError) as caught:
        check_peer_memory(2)
    assert caught.value.lines == (message,)
    with pytest.raises(ConfigError) as refused:
        meshtrain.parallelize(build_meta_model(load_hf_config(MODEL), dtype=torch.float32), ASYNC)
    assert refused.value.lines == (message,)
    assert not dist.is_initialized()


def test_a_proof_leaves_it_out() -> None:
    plan, _ = resolved()
    small = shrink_plan(plan, MeshPlan(dp_shard=1, tp=2))
    assert small.tensor == plan.tensor.model_copy(update={"async_tp": False})


def fused_operators(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("symm_mem.")]


def losses_of(**tables: Any) -> list[float]:
    plan, model = resolved(**tables)
    pipeline = build_pipeline(
        model, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=2, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    context, rows = build_step_context(pipeline), local_rows(pipeline, batches()[0])
    return [train_step(context, step, rows, np.arange(GLOBAL_BATCH)).loss for step in range(2)]


def train() -> tuple[list[list[str]], list[float], list[float]]:
    """Return the fused operators of each compiled graph, and the losses with and without them."""
    # A CPU has no symmetric memory. There torch's definitions of the fused operators are computed.
    fused = torch.library.Library("symm_mem", "IMPL")
    fused.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    fused.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    dist.is_nccl_available = lambda: True
    inductor.force_disable_caches = True
    fuse, found = post_grad.micro_pipeline_tp_pass, []

    def note(graph: torch.fx.Graph) -> None:
        fuse(graph)
        found.append(fused_operators(graph))

    post_grad.micro_pipeline_tp_pass = note
    losses = losses_of()
    plain = losses_of(tensor={"sequence_parallel": True}, compile={})
    return found, losses, plain


def test_messages_are_fused_with_products_and_compute_the_same() -> None:
    for found, losses, plain in run_on_ranks(2, train, timeout=400):
        gathers = [graph.count("fused_all_gather_matmul") for graph in found if graph]
        scatters = [graph.count("fused_matmul_reduce_scatter") for graph in found if graph]
        # Forward: before attention and MLP, and behind them. Backward: before both, because behind
        # them the gradients of several projections are added before they are sent.
        assert sorted(zip(gathers, scatters, strict=True)) == [(2, 0), (2, 2)]
        assert losses == pytest.approx(plain, rel=1e-6)
