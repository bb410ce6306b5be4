"""Context parallelism computes what one process computes; what cannot is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

import meshtrain
from meshtrain.compat.transformers import set_attention_implementation
from meshtrain.config.families import with_family
from meshtrain.config.mesh import CP, MeshPlan
from meshtrain.config.plan import ContextPlan, ParallelPlan, PrecisionPlan
from meshtrain.config.run import CheckpointConfig, EvaluationConfig, ModelConfig, RunConfig
from meshtrain.errors import ModelError, PlanError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.check.context import context_bytes
from meshtrain.parallel.context.attention import num_exchanged_keys
from meshtrain.parallel.context.columns import Columns
from meshtrain.parallel.context.mixing import mixing_blocks
from meshtrain.parallel.context.positions import skips_padding
from meshtrain.runtime.mesh import all_reduce_over, init_mesh
from meshtrain.training.loss import build_loss
from meshtrain.verify.case import ProofCase, Rows
from meshtrain.verify.prove import prove_together
from meshtrain.verify.verify_run import make_case
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, steps_of, train_here

GATHERED, CONTIGUOUS = ({"method": "all_gather", "order": order} for order in ("head_tail", "contiguous"))


def case_of(
    model_type: str,
    mesh: dict[str, int],
    rows: Rows = "joined",
    *,
    attention: str = "sdpa",
    config: dict[str, Any] | None = None,
    **tables: Any,
) -> ProofCase:
    small = MeshPlan(**{"dp_shard": 1, **mesh})
    plan = with_family(ParallelPlan(mesh=small, **tables), model_type)
    hf_config = load_hf_config(ModelConfig(type=model_type, config=config or {}))
    return make_case(hf_config, plan, small, rows=rows, attention=attention)


def assert_proven(cases: list[ProofCase]) -> None:
    differences = {
        f"{case.architecture} {case.plan.context} {case.rows}": proof.difference
        for case, proof in zip(cases, prove_together(cases), strict=True)
    }
    assert not [found for found in differences.items() if found[1] is not None]


def test_parts_of_sequences_compute_what_one_process_does() -> None:
    cp = {"cp": 2}
    assert_proven(
        [
            case_of("llama", cp, "separate"),
            case_of("llama", cp, "separate", context=GATHERED),
            case_of("llama", cp, "bucketed", context=CONTIGUOUS),
            case_of("gpt2", cp, "padded", context=GATHERED),
            case_of("gpt2", cp, recompute={"mode": "selective"}),
            # Softcaps, windows, and sinks that belong to heads.
            case_of("gemma2", cp, "separate", attention="eager"),
            case_of("gemma2", cp, "bucketed", attention="eager", context=GATHERED),
            case_of("gemma3_text", cp, "separate", context=GATHERED),
            case_of("gpt_oss", cp, "separate", attention="eager"),
            case_of("mixtral", cp, "padded", config={"output_router_logits": True}, context=GATHERED),
            case_of("mixtral", cp, "separate", config={"output_router_logits": True}),
            # One key head for both ranks, and keys of another width than values.
            case_of("llama", cp, config={"num_key_value_heads": 1}),
            case_of("deepseek_v3", cp, "separate"),
            # Frequencies that depend on the longest sequence, of which a rank has a part.
            case_of("llama", cp, "bucketed", config=DYNAMIC, context=GATHERED),
        ]
    )


DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "max_position_embeddings": 8,
}


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}], ids=str)
def test_cp_beside_another_axis_computes_what_one_process_does(mesh: dict[str, int]) -> None:
    both = {"cp": 2, **mesh}
    split = {"sequence_parallel": True} if "tp" in mesh else {}
    cases = [
        case_of("llama", both, "separate", tensor=split),
        case_of("llama", both, "separate", tensor=split, context=GATHERED, recompute={"mode": "full"}),
        case_of("qwen3_moe", both, "bucketed", context=GATHERED),
    ]
    if "pp" in mesh:
        two = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}
        cases += [case_of("gpt2", both), case_of("llama", both, pipeline=two)]
    if "dp_shard" in mesh:
        cases.append(case_of("gpt2", {"cp": 2, "dp_replicate": 2, "dp_shard": 1}, context=GATHERED))
        cases += [case_of("llama", both, shard={"level": level}) for level in (1, 2)]
        cases.append(case_of("llama", both, shard={"offload": "cpu"}))
    assert_proven(cases)


def test_four_ranks_and_all_axes_compute_what_one_process_does() -> None:
    assert_proven([case_of("llama", {"cp": 4}, "separate"), case_of("gpt2", {"cp": 4}, context=GATHERED)])
    every = {"pp": 2, "cp": 2, "tp": 2}
    assert_proven([case_of("llama", every, "separate", tensor={"sequence_parallel": True}, context=GATHERED)])
    assert_proven([case_of("llama", {"dp_replicate": 2, "dp_shard": 2, "cp": 2}, "separate", context=GATHERED)])


def test_compiled_layers_compute_what_one_process_does() -> None:
    compiled = {"compile": {"enabled": True}}
    assert_proven([case_of("llama", {"cp": 2}, **compiled), case_of("llama", {"cp": 2}, context=GATHERED, **compiled)])


def test_blocks_that_mix_positions_compute_what_one_process_does() -> None:
    split = {"tensor": {"sequence_parallel": True}, "context": GATHERED}
    # The padding of a part is not that of the last tokens.
    assert_proven([case_of("qwen3_next", {"cp": 2}), case_of("falcon_h1", {"cp": 2}, "padded", context=GATHERED)])
    # Each microbatch is recomputed with its own padding.
    recomputed = {"recompute": {"mode": "full"}, "context": GATHERED}
    assert_proven([case_of("jamba", {"cp": 2, "pp": 2}, "padded", **recomputed)])
    assert_proven([case_of("qwen3_next", {"cp": 2, "tp": 2}, **split)])


def meta_model(model_type: str, **config: Any) -> PreTrainedModel:
    hf_config = load_hf_config(ModelConfig(type=model_type, config=config))
    return build_meta_model(hf_config, dtype=torch.float32, attention="eager", trust_remote_code=False)


def test_blocks_that_mix_positions_are_found() -> None:
    assert mixing_blocks(meta_model("llama")) == []
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    found = mixing_blocks(meta_model("qwen3_next", num_hidden_layers=4, layer_types=types))
    assert found == ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]
    short = mixing_blocks(meta_model("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]))
    assert short == ["model.layers.0.conv"]


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (
            "bloom",
            "BloomForCausalLM does not compute attention through the interface of transformers, so the tokens of a "
            "part would see that part only",
        ),
        (
            "mamba2",
            "Mamba2ForCausalLM does not compute attention through the interface of transformers, so the tokens of a "
            "part would see that part only",
        ),
        (
            "zamba2",
            "mamba_decoder in the layers of Zamba2ForCausalLM mixes positions and takes several hidden states",
        ),
        # Its queries grow with the number of tokens before them.
        (
            "llama4_text",
            "Llama4ForCausalLM counts the tokens that a process has to compute queries or keys, not their positions",
        ),
    ],
)
def test_classes_that_mix_positions_elsewhere_are_refused(model_type: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        mixing_blocks(meta_model(model_type))
    assert caught.value.lines == (message,)


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn"])
def test_attention_without_masks_is_refused(name: str) -> None:
    model = meta_model("llama")
    set_attention_implementation(model.config, name)
    with pytest.raises(PlanError) as refused:
        resolve_plan(ParallelPlan(mesh=MeshPlan(dp_shard=1, cp=2)), model, BATCH, 2)
    assert refused.value.lines == (
        f"mesh.cp = 2: attention by {name!r} takes no mask, which says what the tokens of a part or document see; use "
        "attention by 'sdpa' or 'eager', or cp = 1",
    )
    one = resolve_plan(ParallelPlan(mesh=MeshPlan(dp_shard=1)), model, replace(BATCH, separates=True), 1)
    assert one.attention.documents == "mask"


def test_positions_that_a_class_counts_in_another_way_are_refused() -> None:
    with pytest.raises(ModelError) as caught:
        skips_padding(meta_model("camembert", is_decoder=True))
    assert caught.value.lines == (
        "CamembertForCausalLM does not count its positions from 0, with or without padding, so those of a part are not "
        "known",
    )
    plan = ParallelPlan(mesh=MeshPlan(dp_shard=1, cp=2))
    with pytest.raises(PlanError) as refused:
        resolve_plan(plan, meta_model("camembert", is_decoder=True), BATCH, 2)
    assert refused.value.lines[0] == f"mesh.cp = 2: {caught.value.lines[0]}; use cp = 1"


def loss_with_padding_between(model_type: str, cp: int) -> float:
    """Return the loss of rows with padding behind their first token."""
    precision = PrecisionPlan(parameters="float64", compute="float64", reduce="float64")
    plan = with_family(ParallelPlan(mesh=MeshPlan(dp_shard=1, cp=cp), precision=precision), model_type)
    dropout = {"dropout": 0.0} if model_type == "opt" else dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    hf_config = load_hf_config(ModelConfig(type=model_type, config={"vocab_size": 64, **dropout}))
    model = build_meta_model(hf_config, dtype=torch.float64, attention="eager")
    plan = resolve_plan(plan, model, BatchShape(2, 2, 16), cp)
    pipeline = build_pipeline(
        model, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=2, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    pads = torch.ones_like(ids)
    pads[0, 1:6] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(pads == 0, -100), "attention_mask": pads}
    loss = pipeline.forward_backward(batch, build_loss(pipeline).mean_over(torch.tensor(25)))
    return float(all_reduce_over(loss.clone(), pipeline.mesh, (CP,)))


@pytest.mark.parametrize("model_type", ["opt", "gpt2"])
def test_padding_before_tokens_moves_positions_where_the_class_does(model_type: str) -> None:
    whole, parts = (run_on_ranks(cp, loss_with_padding_between, model_type, cp)[0] for cp in (1, 2))
    assert parts == pytest.approx(whole, rel=1e-12)
    assert skips_padding(meta_model(model_type)) == (model_type == "opt")


BATCH = BatchShape(8, 2, 32)


class SumsTokens(nn.Embedding):
    """The embedding of a token is the sum of those up to it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).cumsum(1)


class MixesBeforeLayers(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens = SumsTokens(config.vocab_size, config.hidden_size)


class AttentionAndSum(LlamaAttention):
    """Attention to a token and the sum of those up to it."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        output, weights = super().forward(hidden_states, **kwargs)
        return output + hidden_states.cumsum(1), weights


class MixesBesideAttention(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = AttentionAndSum(config, index)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (MixesBeforeLayers, "MixesBeforeLayers mixes positions outside attention and outside the blocks of its layers"),
        (
            MixesBesideAttention,
            "self_attn in the layers of MixesBesideAttention mixes positions by attention and in another way too",
        ),
    ],
)
def test_mixing_that_no_block_has_for_itself_is_refused(kind: type[LlamaForCausalLM], message: str) -> None:
    with torch.device("meta"):
        model = kind(LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64))
    with pytest.raises(ModelError) as caught:
        mixing_blocks(model)
    assert caught.value.lines == (message,)


def test_bytes_of_both_methods_are_counted() -> None:
    plan = with_family(ParallelPlan(mesh=MeshPlan(dp_shard=1, cp=4)), "gpt2")
    # 12 heads of 64 numbers in 4 bytes, and 16 tokens of a part.
    bytes_of = {it: context_bytes(plan, meta_model("gpt2"), BATCH, it) for it in ("ulysses", "all_gather")}
    assert bytes_of == {"ulysses": 4 * 12 * 3 // 4 * 64 * 4 * 16, "all_gather": 2 * 12 * 3 * 64 * 4 * 16}
    assert context_bytes(plan, meta_model("deepseek_v3"), BATCH, "ulysses") is None


def test_segments_in_a_program_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        meshtrain.parallelize(meta_model("gpt2"), {"attention": {"documents": "segments"}})
    assert caught.value.lines == (
        "attention.documents = 'segments': in a program the mask of the model keeps documents apart; leave it out, or "
        "train the model by `meshtrain train` or meshtrain.train",
    )


def problems_of(model_type: str, mesh: dict[str, int], batch: BatchShape = BATCH, **tables: Any) -> tuple[str, ...]:
    plan = with_family(ParallelPlan(mesh=MeshPlan(**{"dp_shard": 1, **mesh}), **tables), model_type)
    with pytest.raises(PlanError) as caught:
        resolve_plan(plan, meta_model(model_type), batch, plan.mesh.world_size)
    return tuple(caught.value.lines)


def test_plans_that_do_not_fit_are_refused() -> None:
    assert problems_of("falcon", {"cp": 2}) == (
        "mesh.cp = 2: FalconForCausalLM does not compute attention through the interface of transformers, so the "
        "tokens of a part would see that part only; use cp = 1",
    )
    assert problems_of("mamba2", {"cp": 2}) == (
        "mesh.cp = 2: Mamba2ForCausalLM takes no position_ids, so it would compute each part as a whole sequence; "
        "use cp = 1",
    )
    assert (
        "context.method = 'ulysses' divides the attention heads of a process over cp = 2, but their number differs "
        "between layers or processes; set it to 'all_gather'"
    ) in problems_of("gpt2", {"cp": 2, "tp": 5}, context={"method": "ulysses"})
    assert problems_of("gpt2", {"cp": 8}, context={"method": "ulysses"}) == (
        "context.method = 'ulysses' divides the attention heads of a process over cp = 8, but there are 12; set it to "
        "'all_gather'",
    )
    assert problems_of("gpt2", {"cp": 2}, context={"method": "ulysses", "order": "head_tail"}) == (
        "context.order = 'head_tail' with context.method = 'ulysses': each process then computes attention for the "
        "full sequence, so the order changes nothing; leave it out",
    )
    assert problems_of("gpt2", {"cp": 4}, BatchShape(8, 2, 30, 6)) == (
        "mesh.cp = 4 divides each sequence into 4 equal parts, which is not possible for data.sequence_length = 30; "
        "set it to 28 or 32",
        "mesh.cp = 4 divides each sequence into 4 equal parts, which is not possible for data.pad_to_multiple_of = 6; "
        "set it to 4 or 8",
    )
    both: dict[str, Any] = {"context": GATHERED, "tensor": {"sequence_parallel": True}}
    assert problems_of("gpt2", {"cp": 2, "tp": 2}, BatchShape(8, 2, 30), **both) == (
        "mesh.cp = 2 with context.order = 'head_tail' and mesh.tp = 2 (sequence_parallel) divides each sequence into 4 "
        "equal parts, which is not possible for data.sequence_length = 30; set it to 28 or 32",
    )


@pytest.mark.parametrize(
    ("mesh", "length", "wanted", "found"),
    [
        ({"cp": 4}, 32, {}, ("ulysses", "contiguous")),
        # 12 heads.
        ({"cp": 8}, 32, {}, ("all_gather", "head_tail")),
        ({"cp": 8}, 24, {}, ("all_gather", "contiguous")),
        ({"cp": 2, "tp": 4}, 32, {}, ("all_gather", "head_tail")),
        ({"cp": 2}, 32, {"method": "all_gather"}, ("all_gather", "head_tail")),
        ({"cp": 2}, 32, CONTIGUOUS, ("all_gather", "contiguous")),
        ({"cp": 1}, 32, {}, ("auto", "auto")),
    ],
)
def test_method_and_order_are_resolved(
    mesh: dict[str, int], length: int, wanted: dict[str, str], found: tuple[str, str]
) -> None:
    plan = with_family(ParallelPlan(mesh=MeshPlan(**{"dp_shard": 1, **mesh}), context=ContextPlan(**wanted)), "gpt2")
    resolved = resolve_plan(plan, meta_model("gpt2"), BatchShape(8, 2, length), plan.mesh.world_size)
    assert (resolved.context.method, resolved.context.order) == found
    assert resolve_plan(resolved, meta_model("gpt2"), BatchShape(8, 2, length), plan.mesh.world_size) == resolved


def test_head_tail_gives_all_ranks_as_many_pairs() -> None:
    columns = Columns("head_tail", 4)
    assert sorted(columns.joined(32).tolist()) == list(range(32))
    assert len({int(columns.of(rank, 32).sum()) for rank in range(4)}) == 1
    assert Columns("contiguous", 4).of(1, 32).tolist() == list(range(8, 16))


@pytest.mark.parametrize(("heads", "keys", "size", "sent"), [(8, 8, 4, 8), (8, 2, 4, 4), (8, 1, 8, 8), (12, 3, 2, 12)])
def test_each_rank_gets_the_keys_of_its_queries(heads: int, keys: int, size: int, sent: int) -> None:
    assert num_exchanged_keys(heads, keys, size) == sent


def run_of(directory: Path, name: str, mesh: dict[str, int], steps: int, form: str, **tables: Any) -> RunConfig:
    plan = build_plan((1, 1, 1, 1)).model_copy(update={"mesh": MeshPlan(**{"dp_shard": 1, **mesh}), **tables})
    changes = {"steps": steps, "checkpoint": CheckpointConfig(every=2), "evaluation": EvaluationConfig(every=2)}
    run = build_run(directory / name, "qwen3", plan, **changes)
    data: dict[str, Any] = {"form": form, "validation": 0.2}
    data |= {"pad_to_multiple_of": 4} if form == "padded" else {"documents": "separate"}
    return run.model_copy(update={"data": run.data.model_copy(update=data)})


def train(config: RunConfig) -> None:
    run_on_ranks(config.plan.mesh.world_size, train_here, config, joins=False)


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_run_resumes_with_and_without_cp(tmp_path: Path, form: str) -> None:
    train(run_of(tmp_path, "alone", {}, 6, form))
    train(run_of(tmp_path, "traveling", {"cp": 2}, 2, form))
    train(run_of(tmp_path, "traveling", {"dp_shard": 2}, 4, form))
    train(run_of(tmp_path, "traveling", {"pp": 2, "cp": 2}, 6, form, context=ContextPlan(**GATHERED)))
    wanted, found = (steps_of(tmp_path / name) for name in ("alone", "traveling"))
    assert [it["step"] for it in found] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(wanted, found, strict=True):
        for metric in {"loss", "grad_norm", "eval_loss"} & {*one}:
            assert other[metric] == pytest.approx(one[metric], rel=1e-12)
