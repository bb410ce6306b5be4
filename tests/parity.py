"""A parallel plan beside the stock model in one process, for all parity tests."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import (
    CompilePlan,
    LossPlan,
    ParallelPlan,
    PipelinePlan,
    PrecisionPlan,
    RecomputePlan,
    ShardPlan,
    TensorPlan,
)
from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.dtypes import DTYPES
from meshtrain.models.initialize import restore_buffers
from meshtrain.parallel import build_pipeline, replicas
from meshtrain.parallel.check.shard import resolve_shard
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import init_mesh
from meshtrain.verify.case import Rows, Trace, make_batches, with_noise
from meshtrain.verify.compare import compare
from meshtrain.verify.parallel import fill as fill_parameters
from meshtrain.verify.parallel import local_rows, train_pipeline
from meshtrain.verify.reference import build_stock, copy_weights, copy_weights_into, train_model
from tests.casts import lift_float32_casts
from tests.ranks import run_on_ranks

# Loaded before casts are lifted: both sides then compute in float64, including position tables.
MODELLING = (modeling_gpt2, modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3)
VOCABULARY, GLOBAL_BATCH = 98, 8
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
# Frequencies change beyond 10 tokens, and some batches are longer.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 10,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
MODELS = {
    "gpt2-tied": ModelConfig(type="gpt2", config=GPT2),
    "gpt2-short": ModelConfig(type="gpt2", config={**GPT2, "n_layer": 3}),
    "gpt2-odd": ModelConfig(type="gpt2", config={**GPT2, "vocab_size": VOCABULARY + 3}),
    "llama-untied": ModelConfig(type="llama", config={**LLAMA, "tie_word_embeddings": False}),
    "llama-tied": ModelConfig(type="llama", config={**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ModelConfig(type="qwen3", config={**LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-deep": ModelConfig(
        type="qwen3", config={**LLAMA, "num_hidden_layers": 8, "head_dim": 8, "tie_word_embeddings": True}
    ),
    "qwen2-grouped": ModelConfig(type="qwen2", config={**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mistral-grouped": ModelConfig(type="mistral", config={**LLAMA, "num_key_value_heads": 2, "head_dim": 8}),
    "llama-longrope": ModelConfig(type="llama", config={**LLAMA, "rope_parameters": LONGROPE}),
    "llama-dynamic": ModelConfig(
        type="llama", config={**LLAMA, "rope_parameters": DYNAMIC, "max_position_embeddings": 10}
    ),
}
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
    rows: Rows = "joined"
    reshard: str = "auto"
    level: int = 3
    reduction: str = "auto"
    prefetch: int | str = "implicit"
    offload: str = "none"
    precision: PrecisionPlan = PROOF
    chunk_tokens: int = 0

    @property
    def world_size(self) -> int:
        return int(np.prod(self.mesh))

    def plan(self) -> ParallelPlan:
        pp, dp_replicate, dp_shard, tp = self.mesh
        stages = pp * self.stages_per_rank
        plan = ParallelPlan(
            mesh=MeshPlan(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp),
            pipeline=PipelinePlan(
                schedule=self.schedule,
                stages_per_rank=self.stages_per_rank,
                layers_per_stage=list(self.layers) or [4 // stages] * stages,
            ),
            shard=ShardPlan(
                level=self.level,
                reshard_after_forward=self.reshard,
                reduce_gradients=self.reduction,
                prefetch=self.prefetch,
                offload=self.offload,
            ),
            precision=self.precision,
            recompute=RecomputePlan(
                mode=self.recompute_mode if self.recompute else "none", every=max(1, self.recompute)
            ),
            compile=CompilePlan(enabled=self.compiled, backend="aot_eager"),
            loss=LossPlan(chunk_tokens=self.chunk_tokens),
        )
        switches = {"sequence_parallel": self.sequence_parallel, "loss_parallel": self.loss_parallel}
        tensor = _family(MODELS[self.model].type or "").model_copy(update=switches)
        return plan.model_copy(update={"tensor": tensor, "shard": resolve_shard(plan)})


@functools.cache
def _family(model_type: str) -> TensorPlan:
    """Read the rules of a family once per process."""
    return with_family(ParallelPlan(), model_type).tensor


def batches(rows: Rows = "joined") -> list[dict[str, Tensor]]:
    """Return one global batch per step."""
    return make_batches(VOCABULARY, GLOBAL_BATCH, rows)


def stock_weights(model: str) -> dict[str, Tensor]:
    """Return weights for the stock model in which no bias is zero and no norm weight is one."""
    return with_noise(copy_weights(_stock_model(model)))


def _stock_model(model: str) -> PreTrainedModel:
    return build_stock(load_hf_config(MODELS[model]))


def reference(model: str, rows: Rows, change: Callable[[PreTrainedModel], None] = lambda _: None) -> Trace:
    """Train the stock model in one process, without meshtrain's parallel code."""
    lift_float32_casts()
    stock = _stock_model(model)
    change(stock)
    copy_weights_into(stock, stock_weights(model))
    return train_model(stock, batches(rows))


def build(
    case: Case,
    *,
    model: ModelConfig | None = None,
    seed: int = 0,
    change: Callable[[PreTrainedModel], None] = lambda _: None,
) -> Pipeline:
    """Build the pipeline of a case on the ranks, materialized but without values.

    Args:
        change: is done to the stock model before it is made parallel.
    """
    plan = case.plan()
    model = model or MODELS[case.model]
    stock = build_meta_model(load_hf_config(model), dtype=DTYPES[case.precision.parameters], attention=model.attention)
    change(stock)
    mesh = init_mesh(plan.mesh, "cpu")
    micro = max(1, GLOBAL_BATCH // (case.mesh[1] * case.mesh[2]) // 4)
    return build_pipeline(stock, mesh, plan, micro_batch_size=micro, seed=seed, device=torch.device("cpu"))


def fill(pipeline: Pipeline, stock: dict[str, Tensor]) -> None:
    """Compute the buffers, and copy stock weights into the shards."""
    for stage in pipeline.stages:
        restore_buffers(stage.model)
    fill_parameters(pipeline, stock)


def smallest_part(pipeline: Pipeline, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the fewest rows that every schedule accepts: two microbatches or one per stage."""
    rows = max(2, pipeline.num_stages) * pipeline.micro_batch_size
    return {name: value[:rows] for name, value in local_rows(pipeline, batch).items()}


def run_case(case: Case) -> Trace:
    """Train a case on the ranks with the product's own step, from the stock weights."""
    lift_float32_casts()
    pipeline = build(case)
    fill(pipeline, stock_weights(case.model))
    return train_pipeline(pipeline, batches(case.rows))


def assert_equal_to_reference(traces: list[Trace], expected: Trace) -> dict[str, float]:
    """Compare all ranks with the reference, each tensor at its scale; return the largest errors."""
    findings = compare(traces, expected, smallest_scale=0.0)
    wrong = [finding for finding in findings if not finding.holds]
    assert not wrong, wrong
    return {finding.what: finding.error for finding in findings}


@functools.cache
def stock(model: str, *, rows: Rows = "joined") -> Trace:
    """Train the stock model once per session."""
    return run_on_ranks(1, reference, model, rows)[0]


def run_cases(cases: list[Case]) -> list[Trace]:
    """Train several cases in sequence, because starting the ranks costs as much as training."""
    return [run_case(case) for case in cases]


def run_with_small_messages(cases: list[Case]) -> list[Trace]:
    """Send every gradient alone during the backward pass, like the large ones of a real model."""
    replicas.LARGE = 1
    return run_cases(cases)


def prove(*cases: Case, run: Callable[[list[Case]], list[Trace]] = run_cases) -> None:
    """Run cases of one world size, and compare each with the stock model."""
    answers = run_on_ranks(cases[0].world_size, run, list(cases))
    for number, case in enumerate(cases):
        worst = assert_equal_to_reference([traces[number] for traces in answers], stock(case.model, rows=case.rows))
        print(case, {name: f"{error:.0e}" for name, error in worst.items()})
