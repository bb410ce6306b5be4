"""LoRA adapters on parallel models, next to peft on the stock model in one process."""

import functools
import hashlib
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from meshtrain.models.adapters import is_adapter_parameter, stock_name, take_off_adapters
from meshtrain.models.build import build_model, load_hf_config
from meshtrain.parallel import parallelize
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import build_mesh
from meshtrain.verify.casts import lift_float32_casts
from meshtrain.verify.parallel import train_pipeline
from meshtrain.verify.reference import build_stock, load_weights, train_model
from meshtrain.verify.subject import Trace
from tests.parity import GLOBAL_BATCH, MODELS, Case, assert_equal_to_reference, batches, fill, stock_weights
from tests.ranks import run_on_ranks

TARGETS: dict[str, Any] = {
    "gpt2-tied": ["c_attn", "c_proj", "c_fc"],
    "llama-untied": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    "qwen2-grouped": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
}


def adapted(model: PreTrainedModel, name: str, **options: Any) -> PreTrainedModel:
    """Let peft adapt a model in place."""
    values = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS[name], "task_type": "CAUSAL_LM"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, LoraConfig(**values)).get_base_model()


def adapter_values(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a value for every parameter of the adapters: B is not zero either, as in the middle of a training."""
    values = {}
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name):
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
            stream = torch.Generator().manual_seed(seed)
            values[name] = 0.1 * torch.randn(parameter.shape, generator=stream, dtype=torch.float64)
    return values


def reference(name: str, options: dict[str, Any]) -> Trace:
    """Train the adapters of the stock model in one process, with nothing of meshtrain's parallel code."""
    lift_float32_casts()
    model = build_stock(load_hf_config(MODELS[name]))
    load_weights(model, stock_weights(name))
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
    """Build a pipeline of an adapted model on meta, with the values that the reference begins with."""
    plan = case.plan()
    model = build_model(load_hf_config(MODELS[case.model]), dtype=torch.float64)
    adapted(model, case.model, **options)
    values = adapter_values(model)
    pipeline = parallelize(
        model,
        build_mesh(plan.mesh, "cpu"),
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


MESHES = {
    "one process": (1, 1, 1, 1),
    "pp": (2, 1, 1, 1),
    "tp": (1, 1, 1, 2),
    "dp_shard": (1, 1, 2, 1),
    "dp_replicate": (1, 2, 1, 1),
}


@pytest.mark.parametrize("axis", MESHES)
def test_adapters_train_like_in_one_process(axis: str) -> None:
    prove(*(Case(model, MESHES[axis]) for model in ("gpt2-tied", "llama-untied")))


def test_sequence_parallel() -> None:
    prove(*(Case(model, (1, 1, 1, 2), sequence_parallel=True) for model in ("gpt2-tied", "llama-untied")))


def test_products_of_axes() -> None:
    prove(
        Case("gpt2-tied", (2, 1, 1, 2), sequence_parallel=True),
        Case("llama-untied", (1, 1, 2, 2), recompute=1),
        Case("llama-untied", (2, 2, 1, 1), "ZBVZeroBubble", 2),
        Case("gpt2-tied", (2, 1, 2, 1), "Interleaved1F1B", 2),
    )
