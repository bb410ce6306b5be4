"""FSDP2 gathers weights that have one scale in float8, and everything is the same to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.compat.operators_seen import name_of
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, PrecisionPlan
from meshtrain.config.run import CheckpointConfig, RunConfig
from meshtrain.parallel import build, build_pipeline
from meshtrain.parallel.float8.gather import _InFloat8, gathers_in_float8
from meshtrain.parallel.float8.product import RECIPES, float8_linear
from meshtrain.parallel.pipeline import full_tensor
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.step import train_step
from meshtrain.verify.parallel import build_step_context, local_rows
from tests.parallel.test_float8 import MODELS, plan_of, resolved
from tests.parity import batches
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, steps_of, train_here

TENSORWISE = {"compute": "float8", "float8": {"skip": [], "recipe": "tensorwise"}}


class Gathered(TorchDispatchMode):
    """Counts the bytes of gathered parameters."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of(func)[1] == "_allgather_base_":
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def train(model: str, tables: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    """Return the losses of three steps, the parameters, and the bytes gathered in the last step."""
    plan = plan_of(model, **{"precision": TENSORWISE, **tables})
    # Three processes get the same number of rows.
    rows = 2 * plan.mesh.data_degree
    plan, meta = resolved(MODELS[model], plan, rows=rows)
    pipeline = build_pipeline(
        meta, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=2, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    context = build_step_context(pipeline)
    batch = {name: value[:rows] for name, value in batches()[0].items()}
    losses = []
    for step in range(3):
        with Gathered() as gathered:
            losses.append(train_step(context, step, local_rows(pipeline, batch), np.arange(rows)).loss)
    parameters = {name: full_tensor(it).detach() for name, it in pipeline.owned_parameters().items()}
    return losses, parameters, gathered.num_bytes


def never(plan: ParallelPlan) -> bool:
    return False


def compare(model: str, tables: dict[str, Any]) -> float:
    """Compare with weights gathered in bfloat16, and return the share of their bytes."""
    build.gathers_in_float8 = never
    try:
        losses, parameters, whole = train(model, tables)
    finally:
        build.gathers_in_float8 = gathers_in_float8
    same_losses, same_parameters, part = train(model, tables)
    assert same_losses == losses
    for name, value in parameters.items():
        assert torch.equal(same_parameters[name], value), name
    return part / whole


Case = tuple[str, dict[str, Any]]
BFLOAT16 = {"parameters": "bfloat16", "reduce": "bfloat16"}
CASES: dict[int, list[Case]] = {
    2: [
        ("llama", {"mesh": {"dp_shard": 2}}),
        ("gpt2", {"mesh": {"dp_shard": 2}, "shard": {"reshard_after_forward": "never"}}),
        ("llama", {"mesh": {"dp_shard": 2}, "recompute": {"mode": "full"}}),
        ("llama", {"mesh": {"dp_shard": 1, "cp": 2}, "shard": {"level": 2}}),
        ("llama", {"mesh": {"dp_shard": 2}, "compile": {"enabled": True, "backend": "aot_eager"}}),
        ("llama", {"mesh": {"dp_shard": 2}, "precision": {**TENSORWISE, **BFLOAT16}}),
    ],
    # Parts that are padded.
    3: [("llama", {"mesh": {"dp_shard": 3}})],
    4: [
        ("llama", {"mesh": {"dp_shard": 2, "tp": 2}, "tensor": {"sequence_parallel": True}}),
        ("gpt2", {"mesh": {"dp_shard": 2, "pp": 2}, "pipeline": {"schedule": "GPipe"}}),
        ("gpt2", {"mesh": {"dp_shard": 2, "dp_replicate": 2}}),
    ],
}


def compare_all(cases: list[Case]) -> list[float]:
    return [compare(*case) for case in cases]


@pytest.mark.parametrize("world_size", CASES)
def test_losses_and_parameters_are_equal_to_the_bit(world_size: int) -> None:
    for shares in run_on_ranks(world_size, compare_all, CASES[world_size]):
        # Embedding, head, norms and biases are sent in bfloat16.
        assert all(0.5 < share < 0.75 for share in shares)


def round_once() -> None:
    """Multiply with a weight, and with what is gathered of it."""
    stream = torch.Generator().manual_seed(0)
    form, recipe = _InFloat8(), RECIPES["tensorwise"]
    x = torch.randn(32, 64, generator=stream).bfloat16()
    for power in (-70, -3, 0, 5):
        weight = torch.randn(48, 64, generator=stream) * torch.logspace(-6, 0, 64)
        # The largest value becomes 224, which then has another scale.
        weight[0, -1] = 226.0
        weight = (weight * 2.0**power).bfloat16()
        ((sent, known),) = form.encode([weight.flatten()], dist.group.WORLD)
        gathered = torch.empty_like(weight)
        form.decode(sent.view(weight.shape), known, gathered)
        assert gathered.abs().amax() == 224.0 * 2.0**power
        results = []
        for factor in (weight, gathered):
            leaf = x.clone().requires_grad_()
            y = float8_linear(recipe, leaf, factor)
            y.sum().backward()
            results.append((y.detach(), leaf.grad))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


def test_the_product_rounds_nothing_a_second_time() -> None:
    run_on_ranks(1, round_once)


def run_of(directory: Path, name: str, mesh: dict[str, int], steps: int) -> RunConfig:
    precision = PrecisionPlan.model_validate(TENSORWISE)
    changes = {"mesh": MeshPlan(**{"dp_shard": 1, **mesh}), "precision": precision}
    plan = build_plan((1, 1, 1, 1)).model_copy(update=changes)
    return build_run(directory / name, "qwen3", plan, steps=steps, checkpoint=CheckpointConfig(every=2))


def test_a_run_resumes_on_other_meshes(tmp_path: Path) -> None:
    for name, meshes in {
        "at once": [{"dp_shard": 2}],
        "resumed": [{"dp_shard": 2}, {"dp_shard": 2}],
        "moved": [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}],
    }.items():
        for number, mesh in enumerate(meshes, start=1):
            config = run_of(tmp_path, name, mesh, 4 // len(meshes) * number)
            run_on_ranks(config.plan.mesh.world_size, train_here, config, joins=False)
    wanted, resumed, moved = ([it["loss"] for it in steps_of(tmp_path / it)] for it in ("at once", "resumed", "moved"))
    assert resumed == wanted
    assert moved == pytest.approx(wanted, rel=0.01)


def test_parameters_on_the_host_are_gathered_in_bfloat16() -> None:
    tables: dict[str, Any] = {"mesh": {"dp_shard": 2}, "precision": TENSORWISE}
    assert gathers_in_float8(ParallelPlan.model_validate(tables))
    # FSDP2 copies these to the device first, and the copy does not know how it is sent.
    assert not gathers_in_float8(ParallelPlan.model_validate({**tables, "shard": {"offload": "cpu"}}))
