"""LoRA adapters on parallel models train like peft's on the stock model in one process."""

import functools
import hashlib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from meshtrain.config.plan import Style
from meshtrain.errors import PlanError
from meshtrain.models.adapters import is_adapter_parameter, stock_name, take_off_adapters
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.parallel.tensor.adapters import check_adapters
from meshtrain.parallel.tensor.rules import resolve_rules
from meshtrain.runtime.mesh import init_mesh
from meshtrain.verify.case import SEQUENCE, Trace
from meshtrain.verify.compare import tensor_error
from meshtrain.verify.parallel import build_step_context, train_pipeline
from meshtrain.verify.reference import build_stock, copy_weights_into, train_model
from tests.casts import lift_float32_casts
from tests.parallel.steps import take_step
from tests.parallel.test_dropout import watched_dropout
from tests.parity import GLOBAL_BATCH, MODELS, Case, assert_equal_to_reference, batches, fill, stock_weights
from tests.ranks import run_on_ranks

TARGETS: dict[str, Any] = {
    "gpt2-tied": ["c_attn", "c_proj", "c_fc"],
    "llama-untied": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    "qwen2-grouped": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
}


def adapted(model: PreTrainedModel, name: str, **options: Any) -> PreTrainedModel:
    """Add peft's adapters to a model in place."""
    values = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS[name], "task_type": "CAUSAL_LM"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, LoraConfig(**values)).get_base_model()


def adapter_values(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a value for every adapter parameter; B is not zero, as during training."""
    values = {}
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name):
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
            stream = torch.Generator().manual_seed(seed)
            values[name] = 0.1 * torch.randn(parameter.shape, generator=stream, dtype=torch.float64)
    return values


def reference(name: str, options: dict[str, Any]) -> Trace:
    """Train the adapters of the stock model in one process, without meshtrain's parallel code."""
    lift_float32_casts()
    model = build_stock(load_hf_config(MODELS[name]))
    copy_weights_into(model, stock_weights(name))
    adapted(model, name, **options)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    with torch.no_grad():
        for parameter, value in adapter_values(model).items():
            model.get_parameter(parameter).copy_(value)
    trace = train_model(model, batches())
    trace.gradients = [{stock_name(name): value for name, value in step.items()} for step in trace.gradients]
    trace.parameters = {stock_name(name): value for name, value in trace.parameters.items()}
    return trace


@functools.cache
def stock(name: str, options: tuple[tuple[str, Any], ...] = ()) -> Trace:
    return run_on_ranks(1, reference, name, dict(options))[0]


def build(case: Case, **options: Any) -> Pipeline:
    """Build a pipeline of an adapted model from meta, with the initial values of the reference."""
    plan = case.plan()
    if case.model == "qwen2-grouped":
        # There are two key-value heads for four processes.
        styles = {f"model.layers.*.self_attn.{kind}_proj": "replicated_heads" for kind in "kv"}
        tensor = plan.tensor.model_copy(update={"styles": {**plan.tensor.styles, **styles}})
        plan = plan.model_copy(update={"tensor": tensor})
    model = build_meta_model(load_hf_config(MODELS[case.model]), dtype=torch.float64)
    adapted(model, case.model, **options)
    values = adapter_values(model)
    pipeline = build_pipeline(
        model,
        init_mesh(plan.mesh, "cpu"),
        plan,
        micro_batch_size=max(1, GLOBAL_BATCH // (case.mesh[1] * case.mesh[2]) // 4),
        seed=0,
        device=torch.device("cpu"),
        adapters=take_off_adapters(model),
    )
    fill(pipeline, {**stock_weights(case.model), **values})
    return pipeline


def train(case: Case, options: dict[str, Any]) -> Trace:
    lift_float32_casts()
    return train_pipeline(build(case, **options), batches())


def train_all(cases: list[Case], options: dict[str, Any]) -> list[Trace]:
    return [train(case, options) for case in cases]


def prove(*cases: Case, **options: Any) -> None:
    answers = run_on_ranks(cases[0].world_size, train_all, list(cases), options)
    for case, traces in zip(cases, zip(*answers, strict=True), strict=True):
        expected = stock(case.model, tuple(options.items()))
        assert {is_adapter_parameter(name) for name in expected.gradients[0]} == {True}
        worst = assert_equal_to_reference(list(traces), expected)
        print(case, {name: f"{error:.0e}" for name, error in worst.items()})


# Several cases share one start of ranks, which costs as much as one of them.
CASES = {
    2: [
        Case("gpt2-tied", (2, 1, 1, 1)),
        Case("llama-untied", (2, 1, 1, 1), "ZBVZeroBubble", 2),
        Case("gpt2-tied", (1, 1, 2, 1)),
        Case("gpt2-tied", (1, 2, 1, 1)),
        Case("gpt2-tied", (1, 1, 1, 2)),
        Case("llama-untied", (1, 1, 1, 2), compiled=True),
        Case("llama-untied", (1, 1, 1, 2), sequence_parallel=True),
    ],
    4: [
        Case("gpt2-tied", (2, 1, 1, 2), sequence_parallel=True),
        Case("llama-untied", (1, 1, 2, 2), recompute=1),
        Case("qwen2-grouped", (1, 1, 1, 4)),
        Case("qwen2-grouped", (1, 1, 1, 4), sequence_parallel=True),
    ],
}


@pytest.mark.parametrize("world_size", CASES)
def test_adapters_train_as_in_one_process(world_size: int) -> None:
    prove(*CASES[world_size])


def test_rank_stabilized_adapters_with_a_bias_train_as_in_one_process() -> None:
    prove(Case("gpt2-tied", (1, 1, 1, 2), sequence_parallel=True), use_rslora=True, lora_bias=True)


def drop(case: Case) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return masks and gradients of a step with adapter dropout, and replicated parameters."""
    pipeline = build(case, lora_dropout=0.5, target_modules=["q_proj", "o_proj"])
    masks: list[tuple[str, Tensor]] = []
    context = build_step_context(pipeline)
    with watched_dropout(masks):
        take_step(context, 0)
    trained = dict(pipeline.trainable_parameters())
    gradients = {name: full_tensor(parameter.grad).clone() for name, parameter in trained.items()}
    whole = {name: parameter.detach() for name, parameter in trained.items() if not isinstance(parameter, DTensor)}
    return [mask for _, mask in masks], gradients, whole


def drop_all(cases: list[Case]) -> list[tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]]:
    return [drop(case) for case in cases]


def test_dropout_is_equal_for_replicated_inputs_and_differs_for_sharded_ones() -> None:
    plain, parts = Case("llama-untied", (1, 1, 1, 2)), Case("llama-untied", (1, 1, 1, 2), sequence_parallel=True)
    cases = [plain, parts, replace(plain, recompute=1), replace(parts, recompute=1)]
    ranks = run_on_ranks(2, drop_all, cases)
    for case, (masks, gradients, whole), (other_masks, other_gradients, other_whole) in zip(cases, *ranks, strict=True):
        # The input of q_proj has 32 features, that of o_proj has 16 of 32 on each rank.
        wide, narrow = ([mask.shape[-1] == width for mask in masks] for width in (32, 16))
        assert any(wide)
        assert any(narrow)
        equal = [torch.equal(mask, other) for mask, other in zip(masks, other_masks, strict=True)]
        assert equal == (wide if not case.sequence_parallel else [False] * len(masks))
        assert {mask.shape[1] for mask, is_wide in zip(masks, wide, strict=True) if is_wide} == {
            SEQUENCE // 2 if case.sequence_parallel else SEQUENCE
        }
        for name in gradients:
            assert torch.equal(gradients[name], other_gradients[name]), name
        assert whole
        assert all(torch.equal(value, other_whole[name]) for name, value in whole.items())
    for first, again in ((0, 2), (1, 3)):
        # A recomputation drops the same elements as the forward pass.
        for name, gradient in ranks[0][first][1].items():
            assert tensor_error(ranks[0][again][1][name], gradient) <= 1e-12, name


def refuse(styles: dict[str, Style], targets: list[str], dropout: float) -> tuple[str, ...]:
    """Return the problems of a plan with other styles for parts of attention."""
    stock = build_meta_model(load_hf_config(MODELS["llama-untied"]), dtype=torch.float64)
    adapted(stock, "llama-untied", target_modules=targets, lora_dropout=dropout)
    layers = take_off_adapters(stock)
    tensor = Case("llama-untied", (1, 1, 1, 2), sequence_parallel=True).plan().tensor
    rules = resolve_rules(stock, tensor)
    others = {f"model.layers.{layer}.self_attn.{name}": style for layer in range(4) for name, style in styles.items()}
    rules = replace(rules, styles={**rules.styles, **others})
    with pytest.raises(PlanError) as error:
        check_adapters(stock, layers, rules, is_split=True)
    return error.value.lines


def test_adapters_on_unsupported_tensor_styles_are_refused() -> None:
    assert refuse({"q_proj": "moe_tp_experts"}, ["q_proj"], 0.0) == (
        "model.layers.*.self_attn.q_proj has a LoRA adapter and the tensor style 'moe_tp_experts', which no adapter "
        "can follow; leave it out of target_modules, or set tp = 1",
    )
    assert refuse({"o_proj": "rowwise_split_input"}, ["o_proj"], 0.1) == (
        "model.layers.*.self_attn.o_proj has a LoRA adapter and the tensor style 'rowwise_split_input': its dropout "
        "cannot be the same on all processes with tensor.sequence_parallel; set lora_dropout = 0, or "
        "tensor.sequence_parallel = false",
    )
