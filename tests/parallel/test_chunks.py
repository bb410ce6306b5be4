"""With head and loss in chunks, plans train like the stock model, without all logits."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, PipelinePlan, PrecisionPlan
from meshtrain.config.run import ModelConfig
from meshtrain.errors import PlanError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.check.head import find_base_apart
from meshtrain.verify.parallel import local_rows, train_pipeline
from tests.parity import LLAMA, Case, batches, build, fill, prove, stock, stock_weights
from tests.ranks import run_on_ranks

# A microbatch has 32 tokens in two rows, so the second chunk of 13 tokens is of both, and the last
# one is shorter.
In13 = partial(Case, chunk_tokens=13)
BFLOAT16 = PrecisionPlan(compute="bfloat16")
FLOAT16 = PrecisionPlan(compute="float16")
MODELS = ("gpt2-tied", "llama-untied", "qwen3")


@pytest.mark.parametrize(
    "mesh", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2)], ids=str
)
def test_chunks_train_like_one_process(mesh: tuple[int, int, int, int]) -> None:
    prove(*(In13(model, mesh) for model in MODELS))


def test_chunks_of_a_split_sequence_train_like_one_process() -> None:
    """The vocabulary of 101 tokens is not divided evenly."""
    mesh = (2, 1, 1, 2)
    prove(
        In13("gpt2-odd", mesh, sequence_parallel=True),
        In13("llama-tied", mesh, sequence_parallel=True, loss_parallel=False),
    )


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [("GPipe", 1), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2)],
)
def test_chunks_train_like_one_process_under_every_schedule(schedule: str, stages_per_rank: int) -> None:
    """Some schedules run the backward pass of the loss twice, or have both ends of a tie."""
    prove(*(In13(model, (2, 1, 1, 1), schedule, stages_per_rank) for model in ("gpt2-tied", "llama-untied")))


def test_chunks_train_like_one_process_with_recomputation_compilation_and_padding() -> None:
    mesh = (1, 1, 2, 2)
    prove(
        In13("qwen3", mesh, recompute=1),
        In13("llama-tied", mesh, recompute=1, recompute_mode="selective"),
        In13("llama-untied", mesh, compiled=True),
        In13("gpt2-tied", mesh, rows="padded", reshard="never"),
        In13("gpt2-tied", mesh, rows="bucketed", offload="cpu"),
    )


def test_a_stage_with_only_the_head_runs_in_chunks() -> None:
    prove(*(In13(model, (2, 1, 1, 1), layers=(4, 0)) for model in ("gpt2-tied", "llama-untied")))


def count_tokens_of_head(cases: list[Case]) -> list[list[int]]:
    """Return the tokens of each call of the head in a step and an evaluation of each case."""
    found = []
    for case in cases:
        pipeline, tokens = build(case), list[int]()
        pipeline.initialize(0)
        head = pipeline.stages[-1].model.lm_head
        head.register_forward_hook(lambda _, args, output, tokens=tokens: tokens.append(output.shape[:-1].numel()))
        train_pipeline(pipeline, [local_rows(pipeline, batches()[0])])
        found.append(tokens)
    return found


def test_the_head_never_sees_more_tokens_than_a_chunk() -> None:
    """Four microbatches of 32 tokens each, twice. The first token's logits are not used."""
    off, in_13 = run_on_ranks(1, count_tokens_of_head, [Case("gpt2-tied", (1,) * 4), In13("gpt2-tied", (1,) * 4)])[0]
    assert off == [32] * 8
    assert in_13 == [1, 13, 13, 6] * 8


@pytest.mark.parametrize("precision", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
def test_chunks_in_16_bits_are_as_close_as_all_logits(precision: PrecisionPlan) -> None:
    """Gradients of chunks are summed in float32, so their error is that of the format."""
    cases = [Case("llama-tied", (1, 1, 2, 1), precision=precision, chunk_tokens=size) for size in (0, 13, 1)]
    answers = run_on_ranks(2, gradients_of, cases)[0]
    exact = stock("llama-tied").gradients[0]
    for name, wanted in exact.items():
        whole, *chunked = (float((found[name].double() - wanted).norm() / wanted.norm()) for found in answers)
        assert all(error < max(2 * whole, 2e-2) for error in chunked), (name, whole, chunked)


def gradients_of(cases: list[Case]) -> list[dict[str, Tensor]]:
    found = []
    for case in cases:
        pipeline = build(case)
        fill(pipeline, {name: value.float() for name, value in stock_weights(case.model).items()})
        found.append(train_pipeline(pipeline, batches()[:1]).gradients[0])
    return found


def resolved(config: dict[str, Any] | None = None, tokens: int = 4096, chunk: int | str = "auto", **tables: Any) -> int:
    values = {**LLAMA, "vocab_size": 131_072, "max_position_embeddings": 65_536, **(config or {})}
    model = build_meta_model(load_hf_config(ModelConfig(type="llama", config=values)), dtype=torch.float32)
    plan = ParallelPlan.model_validate({"mesh": {"dp_shard": 1}, "loss": {"chunk_tokens": chunk}, **tables})
    plan = with_family(plan, "llama")
    size = plan.mesh.pp * plan.mesh.tp
    return resolve_plan(plan, model, BatchShape(4, 1, tokens), size).loss.size


def test_auto_decides_by_the_bytes_of_all_logits() -> None:
    # 131,072 tokens of 4 bytes: 512 KiB for each token of a microbatch.
    assert resolved(tokens=1024) == 0
    assert resolved(tokens=1025) == 512
    assert resolved({"vocab_size": 32_768}, tokens=4096) == 0
    assert resolved({"vocab_size": 32_768}, tokens=4097) == 2048
    # Each process has half of the logits, unless they are gathered.
    assert resolved(tokens=2048, mesh={"tp": 2, "dp_shard": 1}) == 0
    assert resolved(tokens=4096, mesh={"tp": 2, "dp_shard": 1}) == 1024
    assert resolved(tokens=2048, mesh={"tp": 2, "dp_shard": 1}, tensor={"loss_parallel": False}) == 512
    # A larger vocabulary does not make smaller chunks.
    assert resolved({"vocab_size": 524_288}) == 512
    # The loss is float32, whatever computes logits, or float64.
    assert resolved(tokens=1024, precision={"compute": "bfloat16"}) == 0
    assert resolved(tokens=1024, precision=dict.fromkeys(("parameters", "compute", "reduce"), "float64")) == 512
    # A number is left as it is.
    assert resolved(chunk=0) == 0
    assert resolved(tokens=12, chunk=100) == 100


class JoinsPositions(LlamaForCausalLM):
    """Its head adds the states of neighbors."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutput:
        states = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(states + states.roll(1, dims=1)))


class NormOutside(LlamaForCausalLM):
    """Its last norm is not inside of its base model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.last_norm, self.model.norm = self.model.norm, nn.Identity()

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutput:
        states = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(self.last_norm(states)))


def own(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    with torch.device("meta"):
        return kind(load_hf_config(ModelConfig(type="llama", config=LLAMA)))


def refusal(model: LlamaForCausalLM, **tables: Any) -> tuple[str, ...]:
    plan = ParallelPlan.model_validate({"mesh": {"dp_shard": 1}, "loss": {"chunk_tokens": 64}, **tables})
    with pytest.raises(PlanError) as caught:
        resolve_plan(plan, model, BatchShape(4, 1, 12), plan.mesh.pp)
    return caught.value.lines


def test_a_head_that_joins_positions_is_refused_and_auto_leaves_it_whole() -> None:
    (line,) = refusal(own(JoinsPositions))
    assert line.startswith(
        "the head of a JoinsPositions cannot run in chunks: a logit is not made from one position, or the loss not "
        "from logits: the loss differs"
    )
    assert line.endswith("; set loss.chunk_tokens = 0")
    model, plan = own(JoinsPositions), ParallelPlan(mesh=MeshPlan(dp_shard=1))
    model.config.vocab_size = 2**20
    assert resolve_plan(plan, model, BatchShape(4, 4, 64), 1).loss.size == 0


def test_a_last_stage_that_receives_behind_the_base_model_is_refused() -> None:
    mesh = {"pp": 2, "dp_shard": 1}
    assert refusal(own(NormOutside), mesh=mesh, pipeline={"layers_per_stage": [4, 0]}) == (
        "loss.chunk_tokens = 64: last_norm, which is outside of model, uses what the last stage receives from the "
        "stage before; set it to 0, or give the last stage a decoder layer",
    )
    plan = ParallelPlan.model_validate({"mesh": mesh, "loss": {"chunk_tokens": 64}})
    assert resolve_plan(plan, own(NormOutside), BatchShape(4, 1, 12), 2).loss.size == 64


def test_heads_that_may_run_later_are_found() -> None:
    def found(model: LlamaForCausalLM, mesh: MeshPlan, layers: list[int]) -> str | None:
        pipeline = PipelinePlan(layers_per_stage=layers)
        return find_base_apart(ParallelPlan(mesh=mesh, pipeline=pipeline), model)

    one, two = MeshPlan(dp_shard=1), MeshPlan(pp=2, dp_shard=1)
    assert found(own(JoinsPositions), one, [4]) is None
    assert found(own(NormOutside), one, [4]) == "model"
    assert found(own(NormOutside), two, [3, 1]) == "model"
    assert found(own(NormOutside), two, [4, 0]) is None
