"""A parallel plan next to the stock model in one process: what every parity test shares."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from meshtrain.config.plan import (
    CompilePlan,
    MeshPlan,
    ParallelPlan,
    PipelinePlan,
    PrecisionPlan,
    RecomputePlan,
    ShardPlan,
    TensorPlan,
)
from meshtrain.config.run import LearningRateConfig, ModelConfig, OptimizerConfig
from meshtrain.config.toml import with_family
from meshtrain.models.build import DTYPES, build_model, load_hf_config
from meshtrain.models.fused import join_parts
from meshtrain.models.initialize import initialize_weights, restore_buffers
from meshtrain.parallel import parallelize, replicas
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.runtime.mesh import axis_size, build_mesh, data_rank
from meshtrain.training.loss import TokenLoss
from meshtrain.training.loss_scale import build_loss_scale
from meshtrain.training.optim import ShardedAdamW, build_learning_rate
from meshtrain.training.step import Trainer, evaluate, train_step
from meshtrain.verify.parallel import fill as fill_parameters
from tests.ranks import run_on_ranks

VOCABULARY, SEQUENCE, GLOBAL_BATCH, STEPS = 98, 12, 8, 3
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "gpt2-tied": ModelConfig(type="gpt2", config=GPT2),
    "gpt2-odd": ModelConfig(type="gpt2", config={**GPT2, "vocab_size": VOCABULARY + 3}),
    "llama-untied": ModelConfig(type="llama", config={**LLAMA, "tie_word_embeddings": False}),
    "llama-tied": ModelConfig(type="llama", config={**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ModelConfig(type="qwen3", config={**LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-deep": ModelConfig(
        type="qwen3", config={**LLAMA, "num_hidden_layers": 8, "head_dim": 8, "tie_word_embeddings": True}
    ),
    "qwen2-grouped": ModelConfig(type="qwen2", config={**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mistral-grouped": ModelConfig(type="mistral", config={**LLAMA, "num_key_value_heads": 2, "head_dim": 8}),
}
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, max_gradient_norm=0.5)
PROOF = PrecisionPlan(parameters="float64", compute="float64", reduce="float64")


@dataclass(frozen=True)
class Case:
    """One model under one plan."""

    model: str
    mesh: tuple[int, int, int, int]
    """pp, dp_replicate, dp_shard, tp"""
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    layers: tuple[int, ...] = ()
    sequence_parallel: bool = False
    loss_parallel: bool = True
    recompute: int = 0
    recompute_mode: str = "full"
    compiled: bool = False
    padded: bool = False
    reshard: str = "auto"
    offload: str = "none"
    precision: PrecisionPlan = PROOF

    @property
    def world_size(self) -> int:
        return int(np.prod(self.mesh))

    def plan(self) -> ParallelPlan:
        pp, dp_replicate, dp_shard, tp = self.mesh
        stages = pp * self.stages_per_rank
        reshard = {"auto": "never" if pp > 1 or dp_shard == 1 else "always"}.get(self.reshard, self.reshard)
        plan = ParallelPlan(
            mesh=MeshPlan(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp),
            pipeline=PipelinePlan(
                schedule=self.schedule,
                stages_per_rank=self.stages_per_rank,
                layers_per_stage=list(self.layers) or [4 // stages] * stages,
            ),
            shard=ShardPlan(reshard_after_forward=reshard, offload=self.offload),
            precision=self.precision,
            recompute=RecomputePlan(
                mode=self.recompute_mode if self.recompute else "none", every=max(1, self.recompute)
            ),
            compile=CompilePlan(enabled=self.compiled, backend="aot_eager"),
        )
        switches = {"sequence_parallel": self.sequence_parallel, "loss_parallel": self.loss_parallel}
        return plan.model_copy(update={"tensor": _family(MODELS[self.model].type or "").model_copy(update=switches)})


@functools.cache
def _family(model_type: str) -> TensorPlan:
    """Read the rules of a family once per process."""
    return with_family(ParallelPlan(), model_type).tensor


@dataclass
class Trace:
    """What a few training steps leave behind, under the stock names."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float = 0.0


def lift_float32_casts() -> None:
    """Let RMSNorm compute in the type of its input: transformers casts to float32 even where everything is float64."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))

    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        norm.forward = forward


def batches(padded: bool) -> list[dict[str, Tensor]]:
    """Return one global batch per step: trained tokens are uneven between samples, and one sample has none."""
    stream = torch.Generator().manual_seed(5)
    result = []
    for step in range(STEPS):
        ids = torch.randint(3, VOCABULARY, (GLOBAL_BATCH, SEQUENCE), generator=stream)
        labels = torch.randint(3, VOCABULARY, (GLOBAL_BATCH, SEQUENCE), generator=stream)
        labels[torch.rand(labels.shape, generator=stream) < 0.2 + 0.2 * step] = -100
        labels[: GLOBAL_BATCH // 2][torch.rand(GLOBAL_BATCH // 2, SEQUENCE, generator=stream) < 0.4] = -100
        labels[1] = -100
        batch = {"input_ids": ids, "labels": labels}
        if padded:
            lengths = torch.randint(4, SEQUENCE + 1, (GLOBAL_BATCH, 1), generator=stream)
            batch["attention_mask"] = (torch.arange(SEQUENCE) < lengths).long()
            labels[batch["attention_mask"] == 0] = -100
        result.append(batch)
    return result


def stock_weights(model: str) -> dict[str, Tensor]:
    """Return weights for the stock model in which no bias is zero and no norm is one."""
    stock = _stock_model(model)
    stream = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.normal_(0.0, 0.05, generator=stream)
            if parameter.dim() == 1:
                parameter.add_(0.5)
    return {name: parameter.detach() for name, parameter in stock.named_parameters(remove_duplicate=False)}


def _stock_model(model: str) -> nn.Module:
    stock = AutoModelForCausalLM.from_config(load_hf_config(MODELS[model]), dtype=torch.float64)
    return stock.train()


def reference(model: str, padded: bool) -> Trace:
    """Train the stock model in one process, with nothing of meshtrain."""
    lift_float32_casts()
    stock = _stock_model(model)
    stock.load_state_dict(stock_weights(model))
    decay = [parameter for parameter in stock.parameters() if parameter.dim() >= 2]
    rest = [parameter for parameter in stock.parameters() if parameter.dim() < 2]
    groups = [{"params": decay, "weight_decay": OPTIMIZER.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate, betas=betas, eps=OPTIMIZER.epsilon)
    trace = Trace()
    for batch in batches(padded):
        optimizer.zero_grad()
        loss = _stock_loss(stock, batch)
        loss.backward()
        trace.losses.append(loss.item())
        trace.gradients.append({name: parameter.grad.clone() for name, parameter in stock.named_parameters()})
        trace.norms.append(nn.utils.clip_grad_norm_(stock.parameters(), OPTIMIZER.max_gradient_norm).item())
        optimizer.step()
    trace.parameters = {name: parameter.detach().clone() for name, parameter in stock.named_parameters()}
    with torch.no_grad():
        trace.evaluation = _stock_loss(stock.eval(), batches(padded)[0]).item()
    return trace


def _stock_loss(stock: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits, labels = stock(**inputs, use_cache=False).logits.flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / (labels != -100).sum()


def build(case: Case, *, model: ModelConfig | None = None, seed: int = 0) -> Pipeline:
    """Build the pipeline of a case on the ranks, materialised but without values."""
    plan = case.plan()
    model = model or MODELS[case.model]
    stock = build_model(load_hf_config(model), dtype=DTYPES[case.precision.parameters], attention=model.attention)
    mesh = build_mesh(plan.mesh, "cpu")
    micro = max(1, GLOBAL_BATCH // (case.mesh[1] * case.mesh[2]) // 4)
    return parallelize(stock, mesh, plan, micro_batch_size=micro, seed=seed, device=torch.device("cpu"))


def initialize_pipeline(pipeline: Pipeline, seed: int = 0) -> None:
    """Fill with the random initialisation."""
    for stage in pipeline.stages:
        initialize_weights(stage.model, seed=seed, names=pipeline.canonical_names())


def fill(pipeline: Pipeline, stock: dict[str, Tensor]) -> None:
    """Compute the buffers, and copy stock weights into the shards."""
    for stage in pipeline.stages:
        restore_buffers(stage.model)
    fill_parameters(pipeline, stock)


def build_trainer(pipeline: Pipeline, optimizer: OptimizerConfig = OPTIMIZER) -> Trainer:
    """Build what a step needs, as a run does."""
    group = pipeline.mesh.get_group("tp") if pipeline.logits_are_sharded else None
    return Trainer(
        pipeline=pipeline,
        loss=TokenLoss(pipeline.stages[0].model.config.vocab_size, group),
        optimizer=ShardedAdamW(pipeline, optimizer),
        learning_rate=build_learning_rate(LearningRateConfig(name="constant"), optimizer.learning_rate, STEPS),
        max_gradient_norm=optimizer.max_gradient_norm,
        loss_scale=build_loss_scale(pipeline.plan.precision),
    )


def local_part(pipeline: Pipeline, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this process's rows of a global batch."""
    size = GLOBAL_BATCH // axis_size(pipeline.mesh, "dp_replicate", "dp_shard")
    start = data_rank(pipeline.mesh) * size
    return {name: value[start : start + size] for name, value in batch.items()}


def smallest_part(pipeline: Pipeline, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return as few of this process's rows as every schedule can run: two microbatches, or one for each stage."""
    rows = max(2, pipeline.num_stages) * pipeline.micro_batch_size
    return {name: value[:rows] for name, value in local_part(pipeline, batch).items()}


def run_case(case: Case) -> Trace:
    """Train a case on the ranks: the product's own step, starting from the stock weights."""
    lift_float32_casts()
    pipeline = build(case)
    fill(pipeline, stock_weights(case.model))
    trainer = build_trainer(pipeline)
    trace = Trace()
    clip = trainer.max_gradient_norm
    for step, batch in enumerate(batches(case.padded)):
        result = train_step(trainer, step, local_part(pipeline, batch), np.arange(GLOBAL_BATCH))
        trace.losses.append(result.loss)
        trace.norms.append(result.gradient_norm)
        unclip = max(1.0, (result.gradient_norm + 1e-6) / clip)
        gradients = {name: full_tensor(p.grad).detach() * unclip for name, p in pipeline.owned_parameters().items()}
        trace.gradients.append(join_parts(gradients, pipeline.fused))
    parameters = {name: full_tensor(p).detach().clone() for name, p in pipeline.owned_parameters().items()}
    trace.parameters = join_parts(parameters, pipeline.fused)
    trace.evaluation = evaluate(trainer, [local_part(pipeline, batches(case.padded)[0])])
    return trace


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest element."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def assert_equal_to_reference(traces: list[Trace], expected: Trace, tolerance: float = 1e-12) -> dict[str, float]:
    """Compare all ranks with the reference, name by name, and return the worst errors."""
    worst = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "parameter": 0.0, "evaluation": 0.0}
    names = set().union(*(trace.parameters for trace in traces))
    assert names == set(expected.parameters), names ^ set(expected.parameters)
    for trace in traces:
        pairs = [("loss", trace.losses, expected.losses), ("norm", trace.norms, expected.norms)]
        pairs.append(("evaluation", [trace.evaluation], [expected.evaluation]))
        for what, found, wanted in pairs:
            errors = [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]
            worst[what] = max(worst[what], *errors)
        for step, gradients in enumerate(trace.gradients):
            for name, gradient in gradients.items():
                error = relative_error(gradient, expected.gradients[step][name])
                assert error <= tolerance, f"gradient of {name} in step {step}: {error:.1e}"
                worst["gradient"] = max(worst["gradient"], error)
        for name, parameter in trace.parameters.items():
            error = relative_error(parameter, expected.parameters[name])
            assert error <= tolerance, f"{name} after {STEPS} steps: {error:.1e}"
            worst["parameter"] = max(worst["parameter"], error)
    assert all(error <= tolerance for error in worst.values()), worst
    return worst


@functools.cache
def stock(model: str, *, padded: bool = False) -> Trace:
    """Train the stock model once per session."""
    return run_on_ranks(1, reference, model, padded)[0]


def run_cases(cases: list[Case]) -> list[Trace]:
    """Train several cases after each other: starting the ranks costs as much as training."""
    return [run_case(case) for case in cases]


def run_with_small_messages(cases: list[Case]) -> list[Trace]:
    """Let every gradient travel alone while the backward pass runs, as the large ones of a real model do."""
    replicas.LARGE = 1
    return run_cases(cases)


def prove(*cases: Case, run: Callable[[list[Case]], list[Trace]] = run_cases) -> None:
    """Run cases of the same world size and compare each with the stock model."""
    answers = run_on_ranks(cases[0].world_size, run, list(cases))
    for number, case in enumerate(cases):
        worst = assert_equal_to_reference([traces[number] for traces in answers], stock(case.model, padded=case.padded))
        print(case, {name: f"{error:.0e}" for name, error in worst.items()})
