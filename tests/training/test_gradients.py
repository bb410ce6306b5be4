"""Gradients between the backward pass and the optimizer, against torch in one process."""

import hashlib

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshtrain.config.families import with_family
from meshtrain.config.plan import ParallelPlan
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.fused import unfuse
from meshtrain.models.layout import local_indices, local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import axis_rank
from meshtrain.training.gradients import finish_gradients, gradient_norm, scale_gradients
from tests.parity import MODELS, Case, build
from tests.ranks import run_on_ranks

CASES = {
    1: [Case("gpt2-tied", (1, 1, 1, 1)), Case("llama-untied", (1, 1, 1, 1))],
    2: [
        Case("gpt2-odd", (1, 1, 1, 2)),
        Case("qwen3", (2, 1, 1, 1)),
        Case("gpt2-tied", (2, 1, 1, 1), "Interleaved1F1B", 2),
    ],
    4: [
        Case("gpt2-odd", (1, 1, 2, 2)),
        Case("gpt2-tied", (2, 1, 1, 2)),
        Case("llama-untied", (1, 2, 2, 1)),
        Case("qwen3", (2, 2, 1, 1)),
        Case("qwen3", (1, 1, 2, 2), sequence_parallel=True),
        Case("llama-tied", (4, 1, 1, 1)),
    ],
    # 101 rows over dp_shard = 3 x tp = 2 are uneven on both axes.
    6: [Case("gpt2-odd", (1, 1, 3, 2))],
}


def global_gradient(name: str, shape: torch.Size) -> Tensor:
    """Return a gradient that depends on the name of its parameter only."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def set_gradients(pipeline: Pipeline) -> None:
    """Set every parameter's part of its global gradient, with the layout of the parameter."""
    canonical = pipeline.canonical_names()
    for name, parameter in pipeline.named_parameters():
        # The tied copy on another stage has the gradient of its original.
        value = global_gradient(canonical[name], parameter.shape)
        for dim, index in enumerate(local_indices(parameter)):
            value = value.index_select(dim, index)
        gradient = torch.empty_like(parameter, requires_grad=False)
        local_tensor(gradient).copy_(value)
        parameter.grad = gradient


def norm_and_scaling(case: Case) -> tuple[float, float, float, float, bool, list[str]]:
    """Return the norm, a sum over pp, and the norms after needed and unneeded scaling."""
    pipeline = build(case)
    set_gradients(pipeline)
    parameters = [parameter for _, parameter in pipeline.named_parameters()]
    further = torch.tensor(float(axis_rank(pipeline.mesh, "pp") + 1), dtype=torch.float64)
    norm, total = gradient_norm(pipeline, further)
    scale_gradients(parameters, norm, 2 * norm.item())
    untouched = gradient_norm(pipeline)[0]
    scale_gradients(parameters, norm, 0.25)
    scaled = gradient_norm(pipeline)[0]
    strided = any(
        isinstance(placement, _StridedShard)
        for parameter in parameters
        if isinstance(parameter, DTensor)
        for placement in parameter.placements
    )
    return norm.item(), total.item(), untouched.item(), scaled.item(), strided, list(pipeline.owned_parameters())


def norms_and_scalings(cases: list[Case]) -> list[tuple]:
    return [norm_and_scaling(case) for case in cases]


def norm_in_one_process(model: str) -> tuple[float, set[str]]:
    """Return torch's norm of the full gradients in one process, and their names."""
    config = load_hf_config(MODELS[model])
    stock = build_meta_model(config, dtype=torch.float64)
    unfuse(stock, with_family(ParallelPlan(), config.model_type).tensor.fused)
    shapes = {name: parameter.shape for name, parameter in stock.named_parameters()}
    parameters = []
    for name, shape in shapes.items():
        parameters.append(nn.Parameter(torch.empty(shape, dtype=torch.float64)))
        parameters[-1].grad = global_gradient(name, shape)
    return nn.utils.clip_grad_norm_(parameters, 0.25).item(), set(shapes)


@pytest.mark.parametrize("world_size", CASES)
def test_gradient_norm_equals_that_of_one_process(world_size: int) -> None:
    ranks = run_on_ranks(world_size, norms_and_scalings, CASES[world_size])
    for number, case in enumerate(CASES[world_size]):
        expected, names = norm_in_one_process(case.model)
        answers = [answer[number] for answer in ranks]
        assert {name for answer in answers for name in answer[-1]} == names
        pp, _, dp_shard, tp = case.mesh
        for norm, total, untouched, scaled, strided, _ in answers:
            assert norm == pytest.approx(expected, rel=1e-14), case
            assert total == pp * (pp + 1) / 2
            assert untouched == norm, "a norm below the limit changes nothing"
            assert scaled == pytest.approx(0.25 * expected / (expected + 1e-6), rel=1e-14)
            assert strided == (dp_shard > 1 and tp > 1)


def finish(case: Case) -> tuple[set[str], dict[str, float], dict[str, float]]:
    """Set different gradients on each process, finish them, and return their new values."""
    pipeline = build(case)
    before = float(2 ** torch.distributed.get_rank())
    for _, parameter in pipeline.named_parameters():
        gradient = torch.empty_like(parameter, requires_grad=False)
        local_tensor(gradient).fill_(before)
        parameter.grad = gradient
    finish_gradients(pipeline)
    values = {name: local_tensor(p.grad).unique() for name, p in pipeline.named_parameters()}
    assert all(value.numel() == 1 for value in values.values())
    canonical = pipeline.canonical_names()
    found = {name: value.item() for name, value in values.items()}
    return (
        set(pipeline.summed_over_tp),
        {name: value for name, value in found.items() if canonical[name] == name},
        {canonical[name]: value for name, value in found.items() if canonical[name] != name},
    )


FINISHED = [
    Case("qwen3", (2, 1, 1, 2)),
    Case("gpt2-tied", (1, 2, 1, 2), sequence_parallel=True),
    Case("llama-untied", (1, 2, 1, 2)),
]


def finish_all() -> list[tuple[set[str], dict[str, float], dict[str, float]]]:
    return [finish(case) for case in FINISHED]


def test_finishing_sums_partial_gradients_only() -> None:
    for rank, (pipeline, sequence_parallel, copies) in enumerate(run_on_ranks(4, finish_all)):
        # Each rank had 2 ** rank in every gradient. Ranks 0 and 1 hold the first stage, 2 and 3 the
        # last.
        summed, owned, far = pipeline
        assert summed == {name for name in owned if "q_norm" in name or "k_norm" in name}
        for name, value in owned.items():
            if name in summed:
                assert value == (1.0 + 2.0 if rank < 2 else 4.0 + 8.0), "both processes of the tp group"
            elif name == "model.embed_tokens.weight":
                assert value == (1.0 + 4.0 if rank == 0 else 2.0 + 8.0), "both ends of the tie"
            else:
                assert value == 2.0**rank
        assert far == ({"model.embed_tokens.weight": 1.0 + 4.0 if rank == 2 else 2.0 + 8.0} if rank >= 2 else {})

        # Two replicas: ranks 0 and 2 hold the same part of the model.
        summed, owned, _ = sequence_parallel
        behind_rowwise = {name for name in owned if name.endswith("c_proj.bias")}
        assert summed == behind_rowwise | {name for name in owned if ".ln_1." in name or ".ln_2." in name}
        over_copies = 1.0 + 4.0 if rank in (0, 2) else 2.0 + 8.0
        for name, value in owned.items():
            assert value == (15.0 if name in summed else over_copies), name
        summed, owned, _ = copies
        assert summed == set()
        assert set(owned.values()) == {over_copies}


def finish_without_a_gradient() -> str:
    pipeline = build(Case("llama-untied", (1, 1, 1, 1)))
    set_gradients(pipeline)
    pipeline.stages[0].model.model.norm.weight.grad = None
    try:
        finish_gradients(pipeline)
    except AssertionError as error:
        return str(error)
    return ""


def test_parameter_without_a_gradient_is_named() -> None:
    assert run_on_ranks(1, finish_without_a_gradient) == ["model.norm.weight has no gradient"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_several_types_are_scaled_together(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.float32)), nn.Parameter(torch.zeros(2, dtype=dtype))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    without = nn.Parameter(torch.zeros(1))
    scale_gradients([*parameters, without], torch.tensor(8.0, dtype=torch.float64), 2.0)
    for parameter in parameters:
        assert parameter.grad is not None
        assert parameter.grad.tolist() == pytest.approx([0.5] * parameter.numel(), rel=1e-6)
    assert without.grad is None
