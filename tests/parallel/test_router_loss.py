"""The auxiliary loss of routers and its gradient equal the stock model's under every plan."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, PipelinePlan, RecomputePlan, TensorPlan
from meshtrain.config.run import ModelConfig
from meshtrain.errors import PlanError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.step import evaluate, train_step
from meshtrain.verify.case import MICRO_BATCH_SIZE, STEPS, ProofCase, Rows, Trace, with_noise
from meshtrain.verify.compare import compare
from meshtrain.verify.parallel import build_step_context, initial_weights, train_plan
from meshtrain.verify.reference import train_stock
from meshtrain.verify.verify_run import make_case
from tests.casts import lift_float32_casts
from tests.parallel.families import Family, resolve_family
from tests.parity import fill
from tests.ranks import run_on_ranks

# Loaded before casts are lifted: both sides compute in float64, including position tables.
MODELLING = (modeling_mixtral, modeling_qwen3_moe)
# The coefficient is large, so that errors are visible.
COEFFICIENT = 0.5
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
MOES = {
    "mixtral": {**ROUTED, "num_hidden_layers": 4},
    # Layer 2 has no experts.
    "qwen3_moe": {**ROUTED, "num_hidden_layers": 4, "mlp_only_layers": [2]},
}


@dataclass(frozen=True)
class Case:
    model_type: str
    mesh: dict[str, int] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    rows: Rows = "padded"

    def subject(self) -> ProofCase:
        config = load_hf_config(ModelConfig(type=self.model_type, config=MOES[self.model_type]))
        plan, mesh = ParallelPlan(**self.tables), MeshPlan(**{"dp_shard": 1, **self.mesh})
        # Two samples per microbatch, so that averaging per sample would be wrong; one batch for all
        # meshes.
        return replace(make_case(config, plan, mesh, rows=self.rows), global_batch_size=4 * MICRO_BATCH_SIZE)


ONE = [Case(kind) for kind in MOES] + [Case("qwen3_moe", tables={"recompute": RecomputePlan(mode="full")})]
TWO = [
    *(Case(kind, {"pp": 2}) for kind in MOES),
    Case("mixtral", {"pp": 2}, {"recompute": RecomputePlan(mode="full")}),
    Case("qwen3_moe", {"pp": 2}, {"pipeline": PipelinePlan(schedule="ZBVZeroBubble", stages_per_rank=2)}),
    Case("mixtral", {"dp_shard": 2}, {"recompute": RecomputePlan(mode="full", every=2)}),
    Case("qwen3_moe", {"dp_replicate": 2}),
    Case("mixtral", {"tp": 2}, {"tensor": TensorPlan(experts="tensor")}),
    Case("qwen3_moe", {"tp": 2}, {"tensor": TensorPlan(experts="expert", sequence_parallel=True)}),
]


def stock(model_types: list[str]) -> dict[str, tuple[dict[str, Tensor], Trace]]:
    lift_float32_casts()
    subjects = {model_type: Case(model_type).subject() for model_type in model_types}
    weights = {model_type: initial_weights(subject) for model_type, subject in subjects.items()}
    return {kind: (weights[kind], train_stock(subjects[kind], weights[kind])) for kind in model_types}


def plans(cases: list[Case], weights: dict[str, dict[str, Tensor]]) -> list[Trace]:
    lift_float32_casts()
    return [train_plan(case.subject(), weights[case.model_type]) for case in cases]


def assert_like_stock(cases: list[Case], world_size: int) -> None:
    expected = stock_once()
    answers = run_on_ranks(world_size, plans, cases, {kind: weights for kind, (weights, _) in expected.items()})
    for number, case in enumerate(cases):
        traces = [traces[number] for traces in answers]
        findings = compare(traces, expected[case.model_type][1])
        assert {"router loss", "gradient", "parameter after 3 steps", "evaluation loss"} <= {it.what for it in findings}
        assert all(finding.holds for finding in findings), (case, findings)
        assert all(len(trace.router_losses) == STEPS for trace in traces)


@functools.cache
def stock_once() -> dict[str, tuple[dict[str, Tensor], Trace]]:
    (answers,) = run_on_ranks(1, stock, list(MOES))
    return answers


def test_one_process_trains_like_the_stock_model() -> None:
    assert_like_stock(ONE, 1)


def test_two_processes_train_like_the_stock_model() -> None:
    assert_like_stock(TWO, 2)


def step_of_one_layer() -> tuple[list[float], list[float]]:
    """Return transformers' loss for one layer and one microbatch, and the sum of ours."""
    lift_float32_casts()
    subject = Case("mixtral", tables={"pipeline": PipelinePlan(layers_per_stage=[1])}).subject()
    subject = replace(subject, global_batch_size=MICRO_BATCH_SIZE)
    weights = initial_weights(subject)
    model = AutoModelForCausalLM.from_config(subject.hf_config, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(with_noise(weights)[name])
    batch = subject.batches()[0]
    labels = batch.pop("labels")
    output = model(**batch, labels=labels, shift_labels=labels, use_cache=False)
    trace = train_plan(subject, weights)
    return [output.loss.item(), output.aux_loss.item()], [
        trace.losses[0] + COEFFICIENT * trace.router_losses[0],
        trace.router_losses[0],
    ]


def test_loss_of_one_layer_and_microbatch_equals_that_of_transformers() -> None:
    ((wanted, found),) = run_on_ranks(1, step_of_one_layer)
    assert found == pytest.approx(wanted, rel=1e-12)


def losses_of_steps() -> tuple[list[tuple[float, float]], list[float]]:
    """Return router loss and gradient norm for two loss scales, and sums around evaluations."""
    lift_float32_casts()
    subject = Case("mixtral", rows="joined").subject()
    model = build_meta_model(subject.hf_config, dtype=torch.float64)
    mesh, device = init_mesh(subject.plan.mesh, "cpu"), torch.device("cpu")
    pipeline = build_pipeline(model, mesh, subject.plan, micro_batch_size=MICRO_BATCH_SIZE, seed=0, device=device)
    fill(pipeline, with_noise(initial_weights(subject)))
    # The learning rate is 0, so the parameters stay unchanged.
    context = replace(build_step_context(pipeline), learning_rate=lambda step: 0.0)
    batch, found = subject.batches()[0], []
    for scale in (1.0, 1024.0):
        context.loss_scale.value = scale
        result = train_step(context, 0, batch, np.arange(subject.global_batch_size))
        found.append((result.router["router_aux_loss"], result.gradient_norm))
    before = pipeline.router_loss.total[0].item()
    evaluate(context, [batch])
    return found, [before, pipeline.router_loss.total[0].item()]


def test_loss_scale_and_evaluation_do_not_change_the_router_loss() -> None:
    (((plain, scaled), (before, after)),) = run_on_ranks(1, losses_of_steps)
    assert scaled == pytest.approx(plain, rel=1e-12)
    assert before == after == pytest.approx(plain[0], rel=1e-12)


def router_losses_with_frozen_layers() -> list[float]:
    """Return the router loss of a step where all layers train, and of one where low ones do not."""
    lift_float32_casts()
    subject, found = Case("mixtral", rows="joined").subject(), []
    for frozen in ((), ("embed", "layers.0.", "layers.1.")):
        model = build_meta_model(subject.hf_config, dtype=torch.float64)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        mesh, device = init_mesh(subject.plan.mesh, "cpu"), torch.device("cpu")
        pipeline = build_pipeline(model, mesh, subject.plan, micro_batch_size=MICRO_BATCH_SIZE, seed=0, device=device)
        fill(pipeline, with_noise(initial_weights(subject)))
        result = train_step(build_step_context(pipeline), 0, subject.batches()[0], np.arange(subject.global_batch_size))
        found.append(result.router["router_aux_loss"])
    return found


def test_layers_without_a_backward_pass_are_in_the_router_loss() -> None:
    ((wanted, found),) = run_on_ranks(1, router_losses_with_frozen_layers)
    assert found == pytest.approx(wanted, rel=1e-12)


MOE = {**ROUTED, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            Family("jetmoe", {"output_router_logits": True, "num_local_experts": 4}),
            "model.config.output_router_logits = True asks for the router's auxiliary loss, but JetMoeForCausalLM has "
            "none that is known here (load_balancing_loss_func, with num_experts, num_experts_per_tok and "
            "router_aux_loss_coef of the model); set it to false",
        ),
        (
            Family("qwen3_moe", {**MOE, "mlp_only_layers": [0, 1]}),
            "model.config.output_router_logits = True asks for losses of the routers, but this Qwen3MoeForCausalLM has "
            "no router that is known here; set output_router_logits to false",
        ),
    ],
)
def test_models_without_a_router_loss_are_refused(family: Family, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolve_family(family, (1, 1, 1, 1))
    assert caught.value.lines == (message,)


def test_routers_on_a_part_of_the_sequence_are_refused() -> None:
    family = Family("mixtral", {**ROUTED, "num_local_experts": 4}, {"sequence_parallel": True})
    plan, model = resolve_family(family, (1, 1, 1, 2))
    styles = {**plan.tensor.styles, "model.layers.*.mlp.gate": "sequence_parallel"}
    changed = plan.model_copy(update={"tensor": plan.tensor.model_copy(update={"styles": styles})})
    with pytest.raises(PlanError) as caught:
        resolve_plan(changed, model, BatchShape(4, 1, 12), 2)
    assert caught.value.lines == (
        "tensor.styles: model.layers.*.mlp.gate is 'sequence_parallel', but model.config.output_router_logits = True "
        "asks for losses of the routers, and every process needs the logits of whole microbatches for them; make it "
        "'replicate', or set output_router_logits to false",
    )
