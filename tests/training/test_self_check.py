"""The self-checks of every run pass without damage and name each damage."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from meshtrain.compat.nn import parameter_table
from meshtrain.errors import TrainingStopped
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import axis_rank
from meshtrain.training.checksums import checksum
from meshtrain.training.self_check import FirstStepCheck, check_parameters
from meshtrain.verify.parallel import build_step_context
from tests.parallel.steps import start, take_step
from tests.parity import Case, batches
from tests.ranks import run_on_ranks
from tests.training.runs import MODELS as RUN_MODELS

# By world size: tied, with norms on heads, with dropout, with uneven shards.
CASES = {
    1: [Case("gpt2-tied", (1, 1, 1, 1)), Case("qwen3", (1, 1, 1, 1)), Case("gpt2-odd", (1, 1, 1, 1))],
    2: [
        Case("gpt2-tied", (2, 1, 1, 1)),
        Case("gpt2-tied", (1, 1, 1, 2)),
        Case("gpt2-odd", (1, 1, 1, 2), sequence_parallel=True),
        Case("qwen3", (1, 1, 2, 1)),
        Case("qwen3", (1, 2, 1, 1)),
        Case("qwen3", (2, 1, 1, 1), "Interleaved1F1B", 2),
    ],
    8: [Case("gpt2-tied", (2, 1, 2, 2)), Case("qwen3", (2, 1, 2, 2), sequence_parallel=True)],
}
ADVICE = (
    "; this is a fault of the plan or of meshtrain, not of the data: run `meshtrain check`, report it, or switch the "
    "checks off with self_checks = false"
)
Q_NORMS = [f"model.layers.{layer}.self_attn.q_norm.weight" for layer in range(4)]


def without_advice(error: TrainingStopped) -> list[str]:
    assert all(problem.endswith(ADVICE) for problem in error.lines), error.lines
    return [problem.removesuffix(ADVICE) for problem in error.lines]


def first_step(pipeline: Pipeline, batch: dict[str, Tensor] | None = None) -> list[str]:
    """Run the first step like a run, and return its problems; they stop it before any update."""
    context = replace(build_step_context(pipeline), inspect=FirstStepCheck(pipeline))
    before = [local_tensor(p.detach()).clone() for _, p in pipeline.named_parameters()]
    try:
        take_step(context, 0, batch)
    except TrainingStopped as error:
        after = [local_tensor(p.detach()) for _, p in pipeline.named_parameters()]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return without_advice(error)
    return []


def checksums(cases: list[Case]) -> list[str]:
    found = []
    for case in cases:
        pipeline = start(case)
        report = check_parameters(pipeline)
        assert report.tied_copies == (("lm_head.weight",) if case.mesh[0] > 1 else ())
        assert first_step(pipeline) == []
        found.append(report.checksum)
    return found


def test_every_mesh_passes_with_the_same_checksum() -> None:
    one = dict(zip((case.model for case in CASES[1]), run_on_ranks(1, checksums, CASES[1])[0], strict=True))
    assert len(set(one.values())) == len(one)
    for world_size in (2, 8):
        for answer in run_on_ranks(world_size, checksums, CASES[world_size]):
            assert answer == [one[case.model] for case in CASES[world_size]]


def test_checksum_depends_on_every_bit_and_position() -> None:
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    whole = checksum(values, "a")
    swapped = values.clone()
    swapped[0, 1], swapped[1, 0] = values[1, 0], values[0, 1]
    flipped = values.clone()
    flipped.view(torch.int32)[3, 3] ^= 1
    found = [checksum(swapped, "a"), checksum(flipped, "a"), checksum(values.T, "a"), checksum(values, "b")]
    assert len({whole, *found}) == 5
    assert checksum(values, "a") == whole
    assert checksum(values.T.contiguous().T, "a") == whole
    kinds = (torch.float64, torch.bfloat16, torch.int64, torch.bool)
    assert len({checksum(values.to(kind), "a") for kind in kinds}) == len(kinds)
    assert checksum(torch.empty(0, 3), "a") == 0
    assert checksum(torch.tensor(1.0), "a") != 0


def problems_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except TrainingStopped as error:
        return without_advice(error)
    return []


def missing_sum() -> list[str]:
    pipeline = start(Case("qwen3", (1, 1, 1, 2)))
    return first_step(replace(pipeline, summed_over_tp=pipeline.summed_over_tp - {*Q_NORMS}))


def other_ids() -> list[str]:
    pipeline, batch = start(Case("llama-untied", (1, 1, 1, 2))), batches()[0]
    return first_step(pipeline, {**batch, "input_ids": batch["input_ids"] + axis_rank(pipeline.mesh, "tp")})


def other_ids_of_stages() -> list[str]:
    pipeline, batch = start(Case("llama-untied", (2, 1, 1, 1))), batches()[0]
    return first_step(pipeline, {**batch, "labels": batch["labels"].roll(axis_rank(pipeline.mesh, "pp"))})


def dropout_by_rank() -> list[str]:
    pipeline = start(Case("gpt2-tied", (1, 1, 1, 2)), model=RUN_MODELS["gpt2-dropout"])
    pipeline.streams.seed = axis_rank(pipeline.mesh, "tp")
    return first_step(pipeline)


def _add(pipeline: Pipeline, name: str, amount: float) -> None:
    with torch.no_grad():
        local_tensor(dict(pipeline.named_parameters())[name]).view(-1)[0] += amount


def perturbed_replica() -> list[str]:
    pipeline = start(Case("llama-untied", (1, 2, 1, 1)))
    _add(pipeline, "model.layers.2.mlp.up_proj.weight", 1e-9 * axis_rank(pipeline.mesh, "dp_replicate"))
    return problems_of(lambda: check_parameters(pipeline))


def perturbed_norm() -> list[str]:
    pipeline = start(Case("llama-untied", (1, 1, 1, 2)))
    _add(pipeline, "model.norm.weight", 1e-9 * axis_rank(pipeline.mesh, "tp"))
    return problems_of(lambda: check_parameters(pipeline))


def untied_copy() -> list[str]:
    pipeline = start(Case("llama-tied", (2, 1, 1, 1)))
    if pipeline.has_last_stage:
        _add(pipeline, "lm_head.weight", 1e-9)
    return problems_of(lambda: check_parameters(pipeline))


def misplaced_parameters() -> list[str]:
    pipeline = start(Case("llama-untied", (2, 1, 1, 1)))
    model = pipeline.stages[0].model.model
    if pipeline.has_last_stage:
        parameter_table(model.embed_tokens)["weight"] = nn.Parameter(torch.ones(1))
        model.layers[3].mlp.register_parameter("extra", nn.Parameter(torch.ones(1)))
        del model.norm.weight
    return problems_of(lambda: check_parameters(pipeline))


DAMAGE: dict[Callable[[], list[str]], str] = {
    missing_sum: "self-check: gradients differ between the ranks 0, 1 of a tp group (more than 1e-08 of their largest "
    "element), although each holds the full parameter: model.layers.0.self_attn.q_norm.weight by ",
    other_ids: "self-check: the batches of ranks 0 and 1 (tp) differ in input_ids; all processes of a pipeline, a cp "
    "group and a tp group must read the same",
    other_ids_of_stages: "self-check: the batches of ranks 0 and 1 (pp) differ in labels, trained tokens; all "
    "processes of a pipeline, a cp group and a tp group must read the same",
    dropout_by_rank: "self-check: gradients differ between the ranks 0, 1 of a tp group (more than 1e-08 of their "
    "largest element), although each holds the full parameter: transformer.wpe.weight by ",
    perturbed_replica: "self-check: parameters differ between ranks 0 and 1 (dp_replicate), which must hold the same: "
    "model.layers.2.mlp.up_proj.weight",
    perturbed_norm: "self-check: parameters differ between ranks 0 and 1 (tp), which must hold the same: "
    "model.norm.weight",
    untied_copy: "self-check: lm_head.weight in stage 1 is tied to model.embed_tokens.weight in stage 0, but their "
    "values differ",
    misplaced_parameters: "self-check: parameters are in no stage: model.norm.weight",
}


def all_damage() -> list[list[str]]:
    return [damage() for damage in DAMAGE]


@pytest.fixture(scope="module")
def damaged() -> list[list[list[str]]]:
    return run_on_ranks(2, all_damage)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_named_on_all_ranks(damaged: list[list[list[str]]], damage: Callable[[], list[str]]) -> None:
    one, other = (answer[list(DAMAGE).index(damage)] for answer in damaged)
    assert one == other
    assert one[0].startswith(DAMAGE[damage]), one
    if damage is misplaced_parameters:
        assert one[1:] == [
            "self-check: stages hold parameters that the model does not have: model.layers.3.mlp.extra",
            "self-check: parameters are in more than one stage: model.embed_tokens.weight (0, 1)",
        ]
    if damage is missing_sum:
        assert len(one) == 1
        assert one[0].endswith("; is a sum over tp missing?")
        assert all(name in one[0] for name in Q_NORMS)
        assert one[0].count(" by ") == len(Q_NORMS)
