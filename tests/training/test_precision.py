"""Number formats: the effect of each on a step, and dynamic loss scaling on every axis."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from meshtrain.checkpoint.huggingface.export import export_checkpoint
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import LossScalePlan, PrecisionPlan, ShardPlan
from meshtrain.config.run import BadStepsConfig
from meshtrain.errors import TrainingStopped
from meshtrain.models.build import load_hf_config
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.runtime.mesh import axis_rank
from meshtrain.training import step as step_module
from meshtrain.training.history import StepHistory
from meshtrain.training.loss_scale import LossScale, build_loss_scale
from meshtrain.training.step import StepContext, StepResult, evaluate, train_step
from meshtrain.verify.parallel import build_step_context, local_rows
from tests.parallel.steps import moments
from tests.parity import GLOBAL_BATCH, MODELS, Case, batches, build, fill, stock_weights
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, read_checkpoint, read_metrics, steps_of
from tests.training.test_metrics import train_and_show
from tests.training.test_resume import assert_same_bits, in_float32, stopped_after, train_on_ranks

FLOAT32 = PrecisionPlan()
BFLOAT16 = PrecisionPlan(compute="bfloat16")
PURE = PrecisionPlan(parameters="bfloat16", compute="bfloat16")
ALL_BFLOAT16 = PrecisionPlan(parameters="bfloat16", compute="bfloat16", reduce="bfloat16")
FLOAT16 = PrecisionPlan(compute="float16")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"parameters": "bfloat16"},
            "`parameters` = 'bfloat16', `compute` = 'float32' and `reduce` = 'float32' do not fit together; in "
            "this order, possible values are: float32, float32, float32; float32, bfloat16, float32 or bfloat16; "
            "float32, float16, float32; float32, float8, float32 or bfloat16; bfloat16, bfloat16, float32 or bfloat16; "
            "bfloat16, float8, float32 or bfloat16; float64, float64, float64",
        ),
        ({"compute": "float16", "reduce": "bfloat16"}, "`compute` = 'float16' and `reduce` = 'bfloat16' do not"),
        ({"compute": "float16", "parameters": "bfloat16"}, "`compute` = 'float16' and `reduce` = 'float32' do not"),
        ({"parameters": "float16", "compute": "float16"}, "Input should be 'float32', 'bfloat16' or 'float64'"),
        (
            {"loss_scale": LossScalePlan(initial=2.0)},
            "`loss_scale` is for `compute` = 'float16', found 'float32'; leave it out, or compute in float16",
        ),
    ],
)
def test_incompatible_formats_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PrecisionPlan(**words)
    assert message in str(caught.value)


def test_initial_scale_below_its_minimum_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"`initial` = 1\.0 is below `minimum` = 4\.0; raise one or lower it"):
        LossScalePlan(initial=1.0, minimum=4.0)


def test_loss_scale_changes_like_in_megatron() -> None:
    plan = LossScalePlan(initial=16.0, growth_interval=3, hysteresis=2, minimum=4.0)
    scale = build_loss_scale(PrecisionPlan(compute="float16", loss_scale=plan))
    seen = []
    for overflowed in map(bool, (1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1)):
        scale.update(overflowed=overflowed)
        seen.append((scale.value, scale.hysteresis_left > 0, scale.can_be_lower))
    # The first overflow is tolerated. Good steps do not reset this tolerance, growth does.
    values = [16.0, 16.0, 16.0, 8.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 4.0, 4.0]
    assert [value for value, _, _ in seen] == values
    assert [can for _, _, can in seen] == [value > 4.0 for value in values]
    other = build_loss_scale(PrecisionPlan(compute="float16", loss_scale=plan))
    other.restore(scale.saved())
    assert other == scale


def test_loss_scale_is_constant_without_float16() -> None:
    scale = build_loss_scale(PrecisionPlan())
    for _ in range(9):
        scale.update(overflowed=False)
    assert (scale.value, scale.can_be_lower, scale.metrics(3), scale.saved()) == (1.0, False, {}, None)
    scale.restore(build_loss_scale(FLOAT16).saved())
    assert scale.value == 1.0


# Steps in every format


def steps(case: Case, num_steps: int = 3) -> tuple[list[StepResult], float, list[Tensor]]:
    """Train from the stock weights; return step results, evaluation and local values."""
    pipeline = build(case)
    fill(pipeline, stock_weights(case.model))
    context = build_step_context(pipeline)
    results = [run_step(context, step) for step in range(num_steps)]
    evaluation = evaluate(context, [local_rows(pipeline, batches()[0])]).loss
    for _, parameter in pipeline.named_parameters():
        assert isinstance(pipeline.stages[0].model, FSDPModule) == (case.precision not in (FLOAT32, ALL_BFLOAT16))
        formats = {parameter.dtype, *(moment.dtype for moment in moments(context.optimizer, parameter).values())}
        assert formats == {getattr(torch, case.precision.parameters)}
        assert parameter.grad is not None
    return results, evaluation, [local_tensor(p.detach()).clone() for _, p in pipeline.named_parameters()]


def run_step(context: StepContext, step: int) -> StepResult:
    return train_step(context, step, local_rows(context.pipeline, batches()[step % 3]), np.arange(GLOBAL_BATCH))


HYBRID = Case("llama-tied", (2, 1, 1, 2), sequence_parallel=True)
FORMATS = {"bfloat16": BFLOAT16, "pure": PURE, "all": ALL_BFLOAT16, "float16": FLOAT16}


def steps_in_all_formats() -> dict[str, tuple[list[StepResult], float, list[Tensor]]]:
    found = {name: steps(replace(HYBRID, precision=precision)) for name, precision in FORMATS.items()}
    found["offload"] = steps(replace(HYBRID, precision=BFLOAT16, offload="cpu"))
    found["float32"] = steps(replace(HYBRID, precision=FLOAT32))
    return found


def test_every_format_trains_on_a_hybrid_mesh() -> None:
    """2 stages x 2 tp with sequence parallel; the results equal float32's up to rounding."""
    for answer in run_on_ranks(4, steps_in_all_formats):
        expected, expected_evaluation, _ = answer["float32"]
        for name in FORMATS:
            results, evaluation, _ = answer[name]
            tolerance = 5e-3 if name == "float16" else 5e-2
            assert evaluation == pytest.approx(expected_evaluation, rel=tolerance), name
            for result, wanted in zip(results, expected, strict=True):
                assert result.loss == pytest.approx(wanted.loss, rel=tolerance), name
                assert result.gradient_norm == pytest.approx(wanted.gradient_norm, rel=tolerance), name
                assert not result.is_skipped
                scaling = {"loss_scale": 65536.0, "skipped_steps": 0} if name == "float16" else {}
                assert result.scaling == scaling
        # Memory on the CPU does not change the arithmetic.
        (results, evaluation, parameters), (others, other_evaluation, other_parameters) = (
            answer[name] for name in ("offload", "bfloat16")
        )
        assert [r.loss for r in results] == [r.loss for r in others]
        assert evaluation == other_evaluation
        assert all(torch.equal(one, other) for one, other in zip(parameters, other_parameters, strict=True))


def accumulated(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of a step, and the stock model's, added in the reduce format."""
    pipeline = build(case)
    fill(pipeline, stock_weights(case.model))
    context = replace(build_step_context(pipeline), max_gradient_norm=float("inf"))
    result = run_step(context, 0)
    stock = AutoModelForCausalLM.from_config(load_hf_config(MODELS[case.model]), dtype=torch.bfloat16)
    stock.load_state_dict(stock_weights(case.model))
    batch = batches()[0]
    num_tokens = (batch["labels"] != -100).sum()
    loss = context.loss.mean_over(num_tokens)
    sums: dict[str, Tensor] = {}
    for start in range(0, GLOBAL_BATCH, pipeline.micro_batch_size):
        part = {name: value[start : start + pipeline.micro_batch_size] for name, value in batch.items()}
        stock.zero_grad()
        logits = stock(input_ids=part["input_ids"], use_cache=False).logits
        loss(logits, part["labels"]).backward()
        for name, parameter in stock.named_parameters():
            gradient = parameter.grad.to(getattr(torch, case.precision.reduce))
            sums[name] = sums[name] + gradient if name in sums else gradient
    assert result.num_tokens == num_tokens
    found = {name: full_tensor(p.grad) for name, p in pipeline.owned_parameters().items() if p.grad is not None}
    return found, {name: value.bfloat16() for name, value in sums.items()}


def test_gradients_of_microbatches_are_added_in_the_reduce_format() -> None:
    for precision in (PURE, ALL_BFLOAT16):
        ((found, expected),) = run_on_ranks(1, accumulated, Case("llama-untied", (1, 1, 1, 1), precision=precision))
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# Overflows


def scaled(pipeline_case: Case, **words: Any) -> StepContext:
    precision = PrecisionPlan(compute="float16", loss_scale=LossScalePlan(**words))
    pipeline = build(replace(pipeline_case, precision=precision))
    fill(pipeline, stock_weights(pipeline_case.model))
    return build_step_context(pipeline)


def poison(ranks_by_axis: dict[str, int]) -> Any:
    """Make a gradient of one process infinite after the backward pass; return an undo function."""
    finish = step_module.finish_gradients

    def finish_poisoned(pipeline: Pipeline) -> None:
        if all(axis_rank(pipeline.mesh, axis) == axis_position for axis, axis_position in ranks_by_axis.items()):
            parameter = next(p for _, p in pipeline.named_parameters() if p.dim() == 2)
            assert parameter.grad is not None
            local_tensor(parameter.grad).view(-1)[:1] = torch.inf
        finish(pipeline)

    step_module.finish_gradients = finish_poisoned
    return lambda: setattr(step_module, "finish_gradients", finish)


def overflow(case: Case) -> dict[str, Any]:
    """Skip a step that overflows on one rank of the mesh, and continue."""
    context = replace(scaled(case, initial=1024.0, hysteresis=1), learning_rate=lambda step: 0.01 / (step + 1))
    first = run_step(context, 0)
    before = [local_tensor(p.detach()).clone() for _, p in context.pipeline.named_parameters()]
    undo = poison({"pp": case.mesh[0] - 1, "dp_shard": case.mesh[2] - 1, "tp": case.mesh[3] - 1})
    skipped = run_step(context, 1)
    after = [local_tensor(p.detach()) for _, p in context.pipeline.named_parameters()]
    unchanged = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    undo()
    last = run_step(context, 2)
    counts = {int(state["step"]) for state in context.optimizer.state.values()}
    return {"results": (first, skipped, last), "unchanged": unchanged, "counts": counts, "scale": context.loss_scale}


def stop_at_the_minimum() -> str:
    context = scaled(Case("llama-untied", (1, 1, 1, 1)), initial=2.0, minimum=2.0)
    poison({})
    try:
        run_step(context, 0)
    except TrainingStopped as error:
        return str(error)
    return ""


def test_overflow_on_one_process_skips_the_step_on_all() -> None:
    cases = [Case("llama-tied", (2, 1, 1, 2)), *(Case("gpt2-tied", (1, 1, 2, 1), level=level) for level in (2, 3))]
    for answer in [answer for case in cases for answer in run_on_ranks(case.world_size, overflow, case)]:
        first, skipped, last = answer["results"]
        assert [result.is_skipped for result in answer["results"]] == [False, True, False]
        assert answer["unchanged"]
        assert skipped.gradient_norm == float("inf")
        assert skipped.scaling == last.scaling == {"loss_scale": 512.0, "skipped_steps": 1}
        assert first.scaling == {"loss_scale": 1024.0, "skipped_steps": 0}
        # Neither the learning rate nor AdamW counts it.
        assert [result.learning_rate for result in (first, last)] == [0.01, 0.005]
        assert answer["counts"] == {2}
        assert isinstance(answer["scale"], LossScale)


def test_overflow_at_the_minimum_scale_stops_the_run() -> None:
    (message,) = run_on_ranks(1, stop_at_the_minimum)
    assert message.startswith("step 1: the loss is 4.")
    assert "the gradient norm inf; stopped before the optimizer step" in message


def overflow_to_the_minimum_and_skip() -> tuple[list[StepResult], tuple[int, int, int]]:
    context = scaled(Case("llama-untied", (1, 1, 1, 1)), initial=4.0, minimum=2.0, hysteresis=1)
    context = replace(context, history=StepHistory(BadStepsConfig(policy="skip")))
    undo = poison({})
    results = [run_step(context, 0), run_step(context, 1)]
    undo()
    results.append(run_step(context, 2))
    return results, (context.history.num_skipped, context.history.num_bad, context.history.bad_in_a_row)


def test_overflow_is_a_bad_step_at_the_minimum_scale_only() -> None:
    ((results, counts),) = run_on_ranks(1, overflow_to_the_minimum_and_skip)
    assert [result.is_skipped for result in results] == [True, True, False]
    assert [result.fault is None for result in results] == [True, False, True]
    assert [result.scaling["loss_scale"] for result in results] == [2.0, 2.0, 2.0]
    assert [result.scaling["skipped_steps"] for result in results] == [1, 2, 2]
    assert counts == (2, 1, 0)


# Complete runs


def test_float16_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """The initial scale is far too high, so steps are skipped before and after the checkpoint."""
    loss_scale = LossScalePlan(initial=2.0**40, backoff_factor=2.0**-8, growth_interval=2, growth_factor=2.0**20)
    precision = PrecisionPlan(compute="float16", loss_scale=loss_scale)
    plan = build_plan((2, 1, 1, 1)).model_copy(update={"precision": precision})
    whole = build_run(tmp_path / "whole", "gpt2", plan, steps=9)
    seen = train_on_ranks(whole)
    resumed = stopped_after(whole, 3, "resumed")
    assert train_on_ranks(resumed) == {step: seen[step] for step in range(3, 9)}
    assert_same_bits(whole, resumed)
    scaling = [
        [(step["loss_scale"], step["skipped_steps"]) for step in steps_of(Path(config.run_directory))]
        for config in (whole, resumed)
    ]
    assert scaling[0] == scaling[1]
    skipped = [count for _, count in scaling[0]]
    assert 0 < skipped[2] < 3 or skipped[2] == 3
    assert skipped[2] < skipped[-1] < 9
    starts = [m for m in read_metrics(Path(resumed.run_directory)) if "parameters_checksum" in m]
    assert [start["step"] for start in starts] == [0, 3]


def test_float8_run_with_rounded_moments_resumes_with_the_same_bits_and_is_exported(tmp_path: Path) -> None:
    float8 = PrecisionPlan.model_validate({"compute": "float8", "float8": {"skip": []}})
    plan = build_plan((1, 1, 2, 1)).model_copy(update={"precision": float8})
    rounded = OptimizerConfig(learning_rate=1e-2, state="bfloat16")
    whole = build_run(tmp_path / "whole", "gpt2", plan, optimizer=rounded)
    train_on_ranks(whole)
    resumed = stopped_after(whole, 3, "resumed")
    train_on_ranks(resumed)
    assert_same_bits(whole, resumed)
    exported = tmp_path / "exported"
    export_checkpoint(Path(whole.run_directory), exported)
    stock = AutoModelForCausalLM.from_pretrained(exported)
    saved = read_checkpoint(Path(whole.run_directory))
    assert torch.equal(stock.transformer.wte.weight, saved["model.transformer.wte.weight"])
    assert {parameter.dtype for parameter in stock.parameters()} == {torch.float32}
    assert saved["optimizer.exp_avg.transformer.wte.weight"].dtype == torch.bfloat16
    # Another mesh goes on in another number format of the computation.
    other = stopped_after(whole, 3, "other").model_copy(update={"plan": in_float32((2, 1, 1, 1))})
    train_on_ranks(other)
    found, expected = (steps_of(Path(config.run_directory))[-1]["loss"] for config in (other, whole))
    assert found == pytest.approx(expected, rel=0.01)


def test_offloaded_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """The optimizer works with the moments that a checkpoint fills."""
    plan = build_plan((1, 1, 2, 1)).model_copy(update={"precision": BFLOAT16, "shard": ShardPlan(offload="cpu")})
    whole = build_run(tmp_path / "whole", "gpt2", plan, self_checks=False)
    shown = run_on_ranks(2, train_and_show, whole, joins=False)[0]
    assert (
        "shard.offload = 'cpu' changes nothing here: without an accelerator, everything is already in host memory"
        in shown
    )
    resumed = stopped_after(whole, 3, "resumed")
    train_on_ranks(resumed)
    assert_same_bits(whole, resumed)
    assert not any("parameters_checksum" in metrics for metrics in read_metrics(tmp_path / "resumed"))
