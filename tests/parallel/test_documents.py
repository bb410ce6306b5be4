"""Packed documents compute what each document alone does, without a mask of all pairs of a row."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import ModelConfig
from meshtrain.errors import PlanError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.layout import local_tensor
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.check.documents import why_mask
from meshtrain.parallel.documents.proof import why_not_alone
from meshtrain.parallel.stage_attention import StageAttention
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.loss import build_loss
from meshtrain.verify.case import ProofCase, make_batches
from tests.api.programs import stock_model
from tests.parallel.test_context import CONTIGUOUS, GATHERED, assert_proven, case_of, meta_model
from tests.ranks import run_on_ranks

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH = BatchShape(2, 2, 16, separates=True)
FULL, SPLIT = {"recompute": {"mode": "full"}}, {"tensor": {"sequence_parallel": True}}
COMPILED = {"compile": {"enabled": True}}


def segments_of(model_type: str, mesh: dict[str, int], attention: str = "sdpa", **tables: Any) -> ProofCase:
    # Llama 4 counts tokens from the start of their row for the temperature of queries.
    same = {"attn_temperature_tuning": False} if model_type == "llama4_text" else {}
    case = case_of(model_type, mesh, "separate", attention=attention, **{"config": same, **tables})
    assert case.plan.attention.documents == "segments"
    return case


def test_documents_alone_compute_what_one_process_does() -> None:
    assert_proven(
        [
            segments_of("llama", {}, recompute={"mode": "selective"}),
            segments_of("llama", {}, **COMPILED),
            segments_of("llama", {}, **COMPILED, **FULL),
            segments_of("gemma3_text", {}),
        ]
    )


def test_every_kind_of_attention_computes_documents_alone() -> None:
    assert_proven(
        [
            segments_of("qwen3", {}),
            segments_of("gpt2", {}),
            segments_of("mistral", {}),
            # Softcaps, chunks, sinks, and keys of another width than values.
            segments_of("gemma2", {}, "eager"),
            segments_of("llama4_text", {}),
            segments_of("gpt_oss", {}, "eager"),
            segments_of("deepseek_v3", {}),
            segments_of("mixtral", {}, config={"output_router_logits": True}),
        ]
    )


def test_documents_over_stages_and_tensor_ranks_compute_what_one_process_does() -> None:
    # Each microbatch is recomputed with its own documents.
    assert_proven([segments_of("llama", {"pp": 2}, **FULL)])
    assert_proven([segments_of("mistral", {"tp": 2}, **SPLIT)])


def test_documents_over_parts_of_sequences_compute_what_one_process_does() -> None:
    assert_proven([segments_of("llama", {"cp": 2}, context=it) for it in ({"method": "ulysses"}, GATHERED)])


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}, {"dp_shard": 2}], ids=str)
def test_documents_on_a_mesh_compute_what_one_process_does(mesh: dict[str, int]) -> None:
    cases = [segments_of(kind, mesh, **FULL) for kind in ("gemma3_text", "llama4_text", "qwen3")]
    if "tp" in mesh:
        cases += [segments_of("llama", mesh, **SPLIT, **COMPILED), segments_of("gpt_oss", mesh, "eager")]
    if "pp" in mesh:
        two = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}
        cases += [segments_of("llama", mesh, pipeline=two), segments_of("gpt2", mesh)]
    assert_proven(cases)


@pytest.mark.parametrize("method", [{"method": "ulysses"}, GATHERED, CONTIGUOUS], ids=["ulysses", "gathered", "one"])
def test_windows_of_documents_over_parts_of_sequences(method: dict[str, str]) -> None:
    mesh = {"cp": 2}
    kinds = (("mistral", "sdpa"), ("gemma3_text", "sdpa"), ("llama4_text", "sdpa"), ("gpt_oss", "eager"))
    assert_proven([segments_of(kind, mesh, attention, context=method) for kind, attention in kinds])
    assert_proven([segments_of("llama", {"cp": 2, "tp": 2}, context=method, **SPLIT, **FULL)])


def build_tiny(**tables: Any) -> PreTrainedModel:
    return build_meta_model(load_hf_config(ModelConfig(type="llama", config=TINY)), dtype=torch.float32)


def graphs_of_batches(tables: dict[str, Any]) -> list[int]:
    """Return the number of compiled graphs after each of a few batches."""
    plan = with_family(ParallelPlan(mesh=MeshPlan(dp_shard=1), **tables), "llama")
    plan = resolve_plan(plan, build_tiny(), BATCH, 1)
    assert plan.attention.documents == "segments"
    pipeline = build_pipeline(
        build_tiny(), init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=2, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    loss, found = build_loss(pipeline), []
    for batch in make_batches(64, 2, "separate"):
        pipeline.forward_backward(batch, loss.mean_over(torch.tensor(32)))
        found.append(counters["stats"]["unique_graphs"])
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_documents_make_no_graph_for_each_batch(recompute: str) -> None:
    tables = {"compile": {"enabled": True, "backend": "aot_eager"}, "recompute": {"mode": recompute}}
    (found,) = run_on_ranks(1, graphs_of_batches, tables)
    # More than none: torch gives up a layer whose recomputation it cannot trace to its end.
    assert found[0] > 0
    assert len({*found}) == 1


def gradient_in_bfloat16(model_type: str, config: dict[str, Any], documents: str) -> tuple[float, Tensor]:
    """Return the loss and all gradients of a microbatch."""
    tables = {"precision": {"compute": "bfloat16"}, "attention": {"documents": documents}}
    plan = with_family(ParallelPlan.model_validate({"mesh": {"dp_shard": 1}, **tables}), model_type)
    model = build_meta_model(load_hf_config(ModelConfig(type=model_type, config=config)), dtype=torch.float32)
    plan = resolve_plan(plan, model, BATCH, 1)
    pipeline = build_pipeline(
        model, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=2, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    (batch, *_) = make_batches(64, 2, "separate")
    loss = pipeline.forward_backward(batch, build_loss(pipeline).mean_over(torch.tensor(32)))
    gradients = [local_tensor(it.grad).flatten() for _, it in pipeline.trainable_parameters() if it.grad is not None]
    return float(loss), torch.cat(gradients)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_documents_alone_in_bfloat16_compute_what_a_mask_computes(model_type: str) -> None:
    config = TINY if model_type == "llama" else {**TINY, "head_dim": 8, "sliding_window": 4}
    (segments, mask) = (
        run_on_ranks(1, gradient_in_bfloat16, model_type, config, documents)[0] for documents in ("segments", "mask")
    )
    assert segments[0] == pytest.approx(mask[0], rel=1e-2)
    assert (segments[1] - mask[1]).norm() <= 1e-2 * mask[1].norm()
    assert not torch.equal(segments[1], mask[1])


def resolved(model: PreTrainedModel, *, separates: bool = True, **tables: Any) -> str:
    plan = with_family(ParallelPlan(mesh=MeshPlan(dp_shard=1), **tables), model.config.model_type)
    return resolve_plan(plan, model, BatchShape(2, 2, 16, separates=separates), 1).attention.documents


class OwnMask(LlamaForCausalLM):
    """A class whose layers read the mask."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.register_forward_pre_hook(_read_mask, with_kwargs=True)


def _read_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    mask = kwargs["attention_mask"]
    assert mask is None or mask.shape


def test_way_of_keeping_documents_apart_is_resolved() -> None:
    llama = build_tiny()
    assert resolved(llama) == "segments"
    assert resolved(llama, attention={"documents": "mask"}) == "mask"
    assert resolved(llama, **COMPILED, recompute={"mode": "selective"}) == "mask"
    # Without documents to keep apart, nothing changes.
    assert resolved(llama, separates=False, attention={"documents": "segments"}) == "auto"
    assert resolved(meta_model("falcon")) == "mask"


def test_why_a_class_needs_a_mask() -> None:
    falcon = meta_model("falcon")
    assert why_mask(ParallelPlan(), falcon) == (
        "FalconForCausalLM does not compute attention through the interface of transformers"
    )
    assert "would differ" in (why_not_alone(meta_model("jamba")) or "")
    with torch.device("meta"):
        own = OwnMask(LlamaConfig(**TINY))
    assert (why_not_alone(own) or "").startswith("OwnMask uses the mask itself (AttributeError: ")
    with pytest.raises(PlanError) as caught:
        resolved(falcon, attention={"documents": "segments"})
    assert caught.value.lines == (
        "attention.documents = 'segments': FalconForCausalLM does not compute attention through the interface of "
        "transformers; set it to 'auto' or 'mask'",
    )


def copy_a_base_model() -> None:
    model, attention = stock_model("llama-tied").eval(), StageAttention("sdpa", by_documents=True)
    attention.watch(model, "model")
    ids, positions = torch.arange(3, 19)[None], torch.cat([torch.arange(10), torch.arange(6)])[None]
    found = copy.deepcopy(model.model)(ids, position_ids=positions, use_cache=False).last_hidden_state
    wanted = stock_model("llama-tied").eval().model(ids, position_ids=positions, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_copy_of_a_base_model_computes_documents_alone() -> None:
    run_on_ranks(1, copy_a_base_model)


def generate_after_documents() -> None:
    model, attention = stock_model("llama-tied"), StageAttention("sdpa", by_documents=True)
    attention.watch(model)
    ids = torch.arange(3, 19)[None]
    inputs = {"input_ids": ids, "position_ids": torch.cat([torch.arange(10), torch.arange(6)])[None]}
    with attention.of(inputs):
        model(**inputs, use_cache=False)
    wanted, options = stock_model("llama-tied").eval(), {"max_new_tokens": 2, "do_sample": False}
    # A static cache makes its masks before the forward pass.
    found = model.eval().generate(ids[:, :5], **options, cache_implementation="static")
    assert torch.equal(found, wanted.generate(ids[:, :5], **options))


def test_masks_after_a_batch_are_not_those_of_its_documents() -> None:
    run_on_ranks(1, generate_after_documents)
