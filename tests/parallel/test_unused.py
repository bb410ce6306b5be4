"""Frozen, unused and sometimes used parameters, compared with torch in one process."""

import functools
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline, replicas
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.state import saved_tensors
from meshtrain.training.step import train_step
from meshtrain.verify.case import OPTIMIZER, SEQUENCE
from meshtrain.verify.compare import tensor_error
from meshtrain.verify.parallel import build_step_context, local_rows
from meshtrain.verify.reference import build_adamw
from tests.casts import lift_float32_casts
from tests.parallel.steps import steps_done
from tests.parity import GLOBAL_BATCH, MODELS, VOCABULARY, Case, fill
from tests.ranks import run_on_ranks

FROZEN = ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.3.mlp.up_proj.weight")
ROUTED = ("model.layers.0.routed.weight", "model.layers.2.routed.weight")
NEVER = ("model.layers.0.never.weight", "model.layers.2.never.weight")
# The samples of a step that use the extra parameters: those of the last data ranks, none, those of
# the first.
STEPS = ([0] * 4 + [1] * 4, [0] * 8, [1] + [0] * 7)
CASES = {
    2: [
        Case("llama-untied", (2, 1, 1, 1)),
        Case("llama-untied", (1, 2, 1, 1)),
        Case("llama-untied", (1, 1, 2, 1)),
        Case("llama-untied", (1, 1, 1, 2)),
        Case("llama-untied", (1, 1, 2, 1), level=2),
    ],
    4: [
        Case("llama-untied", (2, 1, 2, 1)),
        Case("llama-untied", (2, 2, 1, 1)),
        Case("llama-untied", (1, 2, 2, 1)),
        Case("llama-untied", (1, 1, 2, 2)),
        Case("llama-untied", (2, 1, 2, 1), level=2),
        Case("llama-untied", (1, 2, 2, 1), level=2),
    ],
}


@dataclass
class Trace:
    """The state after three steps, under the stock names."""

    without_gradient: list[set[str]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)


def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Compute Llama's layer, with one more projection for samples whose first token selects it."""
    result = type(self).forward(self, hidden_states, **kwargs)
    routed = (hidden_states[:, 0, 0] > 0).nonzero().flatten()
    return result.index_add(0, routed, self.routed(hidden_states[routed])) if len(routed) else result


def change(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze some parameters, and add some that are used for some samples or never."""
    for layer in (model.model.layers[0], model.model.layers[2]):
        width = model.config.hidden_size
        with torch.device(model.device):
            layer.routed = nn.Linear(width, width, bias=False, dtype=model.dtype)
            layer.never = nn.Linear(width, width, bias=False, dtype=model.dtype)
        layer.forward = MethodType(forward, layer)
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(requires_grad=False)
    return model


@functools.cache
def stock_model() -> PreTrainedModel:
    lift_float32_casts()
    stock = AutoModelForCausalLM.from_config(load_hf_config(MODELS["llama-untied"]), dtype=torch.float64).train()
    stream = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in change(stock).named_parameters():
            parameter.normal_(0.0, 0.02, generator=stream)
            parameter.add_(0.5 if parameter.dim() == 1 else 0.0)
            # The first element of a token's embedding selects the extra projection: even tokens use
            # it, on every layer.
            if name == "model.embed_tokens.weight":
                parameter[:, 0] = torch.where(torch.arange(VOCABULARY) % 2 == 0, 3.0, -3.0)
    return stock


def batches() -> list[dict[str, Tensor]]:
    """Return a global batch for each of `STEPS`."""
    stream, result = torch.Generator().manual_seed(5), []
    for routed in STEPS:
        ids = torch.randint(2, VOCABULARY // 2, (GLOBAL_BATCH, SEQUENCE), generator=stream) * 2
        ids[:, 0] += 1 - torch.tensor(routed)
        labels = torch.randint(3, VOCABULARY, ids.shape, generator=stream)
        labels[torch.rand(labels.shape, generator=stream) < 0.3] = -100
        result.append({"input_ids": ids, "labels": labels})
    return result


def reference() -> Trace:
    """Train in one process, without meshtrain."""
    stock, trace = stock_model(), Trace()
    trained = {name: parameter for name, parameter in stock.named_parameters() if parameter.requires_grad}
    optimizer = build_adamw([*trained.values()])
    for batch in batches():
        optimizer.zero_grad()
        logits = stock(input_ids=batch["input_ids"], use_cache=False).logits.flatten(0, 1)
        F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100).backward()
        trace.without_gradient.append({name for name, parameter in trained.items() if parameter.grad is None})
        trace.norms.append(nn.utils.clip_grad_norm_(stock.parameters(), OPTIMIZER.max_gradient_norm).item())
        optimizer.step()
    trace.parameters = {name: parameter.detach() for name, parameter in stock.named_parameters()}
    trace.steps = {name: float(optimizer.state[p].get("step", 0.0)) for name, p in trained.items()}
    return trace


def build(case: Case) -> Pipeline:
    plan, weights = case.plan(), dict(stock_model().named_parameters())
    styles = {"model.layers.*.routed": "replicate", "model.layers.*.never": "replicate"}
    tensor = plan.tensor.model_copy(update={"styles": {**plan.tensor.styles, **styles}})
    plan = plan.model_copy(update={"tensor": tensor})
    model = change(build_meta_model(load_hf_config(MODELS[case.model]), dtype=torch.float64))
    mesh = init_mesh(plan.mesh, "cpu")
    pipeline = build_pipeline(model, mesh, plan, micro_batch_size=1, seed=0, device=torch.device("cpu"))
    fill(pipeline, weights)
    return pipeline


def train(case: Case) -> Trace:
    """Train on the ranks with the product's own step."""
    pipeline, trace = build(case), Trace()
    context = build_step_context(pipeline)
    for step, batch in enumerate(batches()):
        result = train_step(context, step, local_rows(pipeline, batch), np.arange(GLOBAL_BATCH))
        trace.without_gradient.append(set(result.without_gradient))
        trace.norms.append(result.gradient_norm)
    trace.parameters = {name: full_tensor(p).detach().clone() for name, p in pipeline.owned_parameters().items()}
    trace.steps = {name: steps_done(context.optimizer, p) for name, p in pipeline.trainable_parameters()}
    trace.saved = set(saved_tensors(pipeline, context.optimizer))
    return trace


def train_all(cases: list[Case]) -> list[Trace]:
    # A low limit makes every gradient of a replica large: it is sent alone, as soon as it is
    # complete.
    replicas.LARGE = 1
    return [train(case) for case in cases]


@functools.cache
def expected() -> Trace:
    (trace,) = run_on_ranks(1, reference)
    return trace


@pytest.mark.parametrize("world_size", CASES)
def test_unused_parameters_train_as_in_one_process(world_size: int) -> None:
    wanted = expected()
    assert wanted.without_gradient == [{*NEVER}, {*NEVER, *ROUTED}, {*NEVER}]
    for traces in zip(*run_on_ranks(world_size, train_all, CASES[world_size]), strict=True):
        assert set().union(*(trace.parameters for trace in traces)) == set(wanted.parameters)
        for step, names in enumerate(wanted.without_gradient):
            assert set().union(*(trace.without_gradient[step] for trace in traces)) == names
        for trace in traces:
            assert trace.norms == pytest.approx(wanted.norms, rel=1e-12)
            assert trace.steps == {name: wanted.steps[name] for name in trace.steps}
            for name, parameter in trace.parameters.items():
                assert tensor_error(parameter, wanted.parameters[name]) <= 1e-12, name


def test_parameters_without_gradients_are_saved_without_optimizer_state() -> None:
    (trace,) = run_on_ranks(1, train, Case("llama-untied", (1, 1, 1, 1)))
    saved = {name: {key for key in trace.saved if key.endswith(f".{name}")} for name in trace.parameters}
    assert all(keys == {f"model.{name}"} for name, keys in saved.items() if name in FROZEN)
    assert all(keys == {f"model.{name}"} for name, keys in saved.items() if name in NEVER)
    assert all(len(keys) == 4 for name, keys in saved.items() if name not in {*FROZEN, *NEVER})
