"""Rules that are derived from what a model computes, for classes that nobody wrote rules for."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

import meshtrain
from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, TensorPlan
from meshtrain.errors import PlanError
from meshtrain.models.build import build_meta_model, stock_like
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.tensor.dataflow import RuleTables, derive_rules
from meshtrain.parallel.tensor.dataflow.blocks import Part, find_cuts
from meshtrain.parallel.tensor.dataflow.reach import Reach
from meshtrain.parallel.tensor.dataflow.shares import PARTS, find_shares
from meshtrain.parallel.tensor.derive import with_derived_rules
from tests.api.programs import full_parameters, make_adam
from tests.benchmarks.collectives import MODELS, layer_counts
from tests.parallel.families import Family
from tests.parallel.own_class import make_own
from tests.ranks import run_on_ranks


def rules_of(model_type: str, **config: Any) -> RuleTables:
    hf_config = Family(model_type, config).hf_config()
    return derive_rules(build_meta_model(hf_config, dtype=torch.float32, attention="eager"))


def eye(size: int, times: int = 1) -> torch.Tensor:
    return torch.eye(size, dtype=torch.bool).repeat_interleave(times, 0)


def test_rules_of_a_class_without_a_plan() -> None:
    rules = rules_of("bert", is_decoder=True)
    layer = "bert.encoder.layer.*."
    assert rules.styles == {
        f"{layer}attention.self.query": "colwise",
        f"{layer}attention.self.key": "colwise",
        f"{layer}attention.self.value": "colwise",
        f"{layer}attention.output.dense": "rowwise",
        f"{layer}intermediate.dense": "colwise",
        f"{layer}output.dense": "rowwise",
    }


def test_fused_projections_and_counts_are_found() -> None:
    rules = rules_of("gpt2", n_embd=32, n_head=4, n_layer=2)
    assert rules.fused == {"transformer.h.*.attn.c_attn": ["first", "second", "third"]}
    assert rules.local_attributes == {"transformer.h.*.attn": ["split_size"]}


def test_inputs_with_values_for_every_head_are_found() -> None:
    assert rules_of("mpt").local_inputs == {"transformer.blocks.*.attn": ["position_bias"]}
    old = rules_of("falcon", alibi=True, multi_query=False, num_kv_heads=4)
    # Some attention implementations find ALiBi in the mask.
    assert old.local_inputs == {"transformer.h.*.self_attention": ["alibi", "attention_mask"]}
    assert not rules_of("falcon").local_inputs


@pytest.mark.parametrize(
    ("heads", "shares"),
    [
        (4, ["first", "second", "third"]),
        (2, {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}),
        (1, {"first": "num_attention_heads", "second": 2}),
    ],
)
def test_parts_of_other_widths_have_shares(heads: int, shares: Any) -> None:
    rules = rules_of("phi3", num_key_value_heads=heads)
    assert rules.fused["model.layers.*.self_attn.qkv_proj"] == shares
    styles = [rules.styles[f"model.layers.*.self_attn.qkv_proj.{part}"] for part in shares]
    assert styles == ["colwise"] * 3 if heads > 1 else ["colwise", "replicated_with_grad_allreduce"]


def parts(*widths: int, shared: int | None = None) -> list[Part]:
    return [*(Part(width, "cut") for width in widths), *([Part(shared, "shared")] if shared else [])]


def test_shares_are_numbers_that_fit_both_copies() -> None:
    small, large = (
        PretrainedConfig(num_attention_heads=heads, num_key_value_heads=keys, half=heads // 2, fixed=2)
        for heads, keys in ((4, 2), (12, 4))
    )
    configs = (small, large)
    # Two fits the first copy as well.
    assert find_shares(parts(32, 16), parts(96, 32), configs) == ("num_attention_heads", "num_key_value_heads")
    assert find_shares(parts(32, 16), parts(96, 48), configs) == ("num_attention_heads", "half")
    assert find_shares(parts(32, shared=16), parts(96, shared=16), configs) == ("num_attention_heads", 2)
    # Nothing tells what a width is that is the same in both, or which part of a projection it is.
    assert find_shares(parts(32, 16), parts(96, 16), configs) is None
    assert find_shares(parts(32, 16), parts(96, shared=16), configs) is None


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_derived_rules_are_those_of_the_written_families(model_type: str) -> None:
    model = build_meta_model(Family(model_type).hf_config(), dtype=torch.float32, attention="eager")
    plan = ParallelPlan(mesh=MeshPlan(tp=2))
    written = with_family(plan, model_type).tensor
    derived = TensorPlan(auto=True, **vars(derive_rules(model)))
    found = with_derived_rules(plan.model_copy(update={"tensor": derived}), model).tensor
    # Derived rules cannot know what the parts of a fused projection are called.
    names = dict(zip(("q", "k", "v"), PARTS, strict=False))
    renamed = {re.sub(r"(?<=c_attn\.)[qkv]$", lambda it: names[it[0]], p): s for p, s in written.styles.items()}
    assert found.styles == renamed
    assert found.fused == {p: [names[part] for part in parts] for p, parts in written.fused.items()}
    assert found.local_attributes == written.local_attributes
    assert found.local_inputs == written.local_inputs


def test_derived_rules_need_not_one_collective_more() -> None:
    names = ["Llama", "Falcon, multi-query", "MPT"]
    for found in run_on_ranks(2, layer_counts, names):
        assert all(sum(count) <= MODELS[name][2] for name in names for count in found[name].values())


def test_own_class_has_rules() -> None:
    rules = derive_rules(stock_like(make_own()))
    assert rules.styles == {
        "stack.*.mixer.asks": "colwise",
        "stack.*.mixer.offers": "replicated_with_grad_allreduce",
        "stack.*.mixer.gives": "colwise",
        "stack.*.mixer.binds": "rowwise",
        "stack.0.mixer": "local_params",
        "stack.2.mixer": "local_params",
        "stack.*.mixer.scale": "colwise",
        "stack.*.wide.both.first": "colwise",
        "stack.*.wide.both.second": "colwise",
        "stack.*.wide.back": "rowwise",
        **{f"stack.*.mixer.all.{part}": "colwise" for part in ("first", "second", "third")},
        "stack.*.mixer.out": "rowwise",
    }
    assert rules.local_attributes == {
        "stack.0.mixer": ["count"],
        "stack.1.mixer": ["heads"],
        "stack.2.mixer": ["count"],
        "stack.3.mixer": ["heads"],
    }


@pytest.mark.parametrize(
    ("twin", "whole"),
    [("mix across heads", {"asks", "gives", "binds"}), ("norm over the width", {"both", "back"})],
)
def test_what_mixes_blocks_stays_whole(twin: str, whole: set[str]) -> None:
    styles = derive_rules(stock_like(make_own(twin))).styles
    assert styles
    assert not {part for pattern in styles for part in pattern.split(".")} & whole


@pytest.mark.parametrize(
    ("twin", "style"),
    [
        ("", "shared_input"),
        ("by name", "local_params"),
        ("core", "whole_sequence"),
        ("input in the result", "whole_sequence"),
        ("temperature alone", "shared_input"),
        ("temperature", "whole_sequence"),
        ("temperature of the core", "whole_sequence"),
    ],
)
def test_a_block_shares_its_input_where_that_reaches_all_of_it(twin: str, style: str) -> None:
    plan = with_derived_rules(ParallelPlan(mesh=MeshPlan(tp=2)), stock_like(make_own(twin)))
    styles = plan.tensor.styles
    # If all mixers have the same style, the rule is for all layers.
    assert styles.get("stack.0.mixer", styles.get("stack.*.mixer")) == style
    core = "stack.*.mixer.core" if "core" in twin else "stack.*.mixer"
    if "core" in twin:
        assert styles[core] == "local_params"
    temperature = "replicated_with_grad_allreduce" if "temperature" in twin else None
    wanted = {"scale": "colwise", "temperature": temperature, "gain": None}
    assert {name: styles.get(f"{core}.{name}") for name in wanted} == wanted


@pytest.mark.parametrize(
    ("twin", "what"),
    [
        ("temperature twice", "temperature is"),
        ("norm twice", "norm is 'replicated_with_grad_allreduce', but it is"),
        ("key in the result", "offers is 'shared_outputs', but it is"),
    ],
)
def test_what_works_on_heads_and_on_results_is_refused(twin: str, what: str) -> None:
    plan = ParallelPlan(mesh=MeshPlan(tp=2))
    if twin == "norm twice":
        # Derived rules leave this mixer whole.
        tensor = with_derived_rules(plan, stock_like(make_own())).tensor
        styles: dict[str, Any] = {**tensor.styles, "stack.*.mixer.norm": "replicated_with_grad_allreduce"}
        plan = plan.model_copy(update={"tensor": tensor.model_copy(update={"styles": styles})})
    with pytest.raises(PlanError) as caught:
        resolve_plan(plan, stock_like(make_own(twin)), BatchShape(2, 1, 12), 2)
    assert caught.value.lines == (
        f"tensor.styles: stack.*.mixer.{what} used both on the heads, or the width, of one process and on full "
        "tensors, so its gradient would be partial or count several times; set mesh.tp = 1",
    )


MIXER = "tensor.styles: stack.*.mixer"


@pytest.mark.parametrize(
    ("twin", "changed", "line"),
    [
        (
            "temperature",
            {"stack.*.mixer.gain": "replicated_with_grad_allreduce"},
            f"{MIXER}.gain gets the same input on every process, so its gradient would count several times; make it "
            "'replicate'",
        ),
        (
            "",
            {"stack.*.mixer.offers": "shared_outputs"},
            f"{MIXER}.offers is 'shared_outputs', but inside of stack.*.mixer ('shared_input') each process works for "
            "its shards only, so the gradient of its outputs would be summed twice; make it "
            "'replicated_with_grad_allreduce'",
        ),
        (
            # The rule is left out for one of two layers with equal modules.
            "temperature",
            {"stack.*.mixer.temperature": None, "stack.0.mixer.temperature": "replicated_with_grad_allreduce"},
            f"{MIXER}.temperature works on the heads, or the width, of one process, so its gradient must be summed; "
            "make it 'replicated_with_grad_allreduce'",
        ),
        (
            "temperature alone",
            {"stack.*.mixer.temperature": None},
            f"{MIXER} is 'shared_input', and no rule shards its stack.*.mixer.temperature, or sums its gradient; make "
            "that 'colwise' or 'replicated_with_grad_allreduce', or stack.*.mixer 'whole_sequence'",
        ),
        (
            "bias of queries",
            {},
            f"{MIXER}.bias works on the heads, or the width, of one process, so its gradient must be summed; call it "
            "neither 'weight' nor 'bias', so that it can have a rule, or set mesh.tp = 1",
        ),
    ],
    ids=["sum of a full gradient", "sum inside a block", "rule for one layer", "no sum in a block", "bias"],
)
def test_rules_that_sum_wrong_gradients_are_refused(twin: str, changed: dict[str, Any], line: str) -> None:
    plan = with_derived_rules(ParallelPlan(mesh=MeshPlan(tp=2)), stock_like(make_own(twin)))
    styles = {name: style for name, style in {**plan.tensor.styles, **changed}.items() if style is not None}
    wrong = plan.model_copy(update={"tensor": plan.tensor.model_copy(update={"styles": styles})})
    with pytest.raises(PlanError) as caught:
        resolve_plan(wrong, stock_like(make_own(twin)), BatchShape(2, 1, 12), 2)
    assert caught.value.lines == (line,)


def train_own(
    mesh: dict[str, int], twin: str = "", tensor: dict[str, bool] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of three steps, and the parameters that this process holds."""
    model: Any = make_own(twin)
    if mesh:
        plan = {"mesh": mesh, "tensor": tensor or {}}
        model = meshtrain.parallelize(model, plan, prove_unknown_class=False)
    optimizer = make_adam(model)
    stream = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(3):
        ids = torch.randint(64, (2, 12), generator=stream)
        optimizer.zero_grad()
        if isinstance(model, torch.nn.Module):
            loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        else:
            loss = model.forward_backward({"input_ids": ids, "labels": ids})
        optimizer.step()
        losses.append(loss.item())
    found = full_parameters(model) if mesh else {name: p.detach() for name, p in model.named_parameters()}
    return losses, {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize(
    ("mesh", "twin", "is_split"),
    [
        ({"tp": 2}, "", False),
        ({"pp": 2}, "", False),
        ({"pp": 2, "tp": 2}, "", False),
        ({"tp": 2}, "by name", False),
        ({"tp": 2}, "core", False),
        ({"tp": 2}, "temperature", False),
        ({"tp": 2}, "temperature alone", False),
        ({"tp": 2}, "temperature of the core", False),
        ({"tp": 2}, "input in the result", False),
        ({"tp": 2}, "temperature", True),
        ({"tp": 2}, "temperature alone", True),
        ({"tp": 2}, "input in the result", True),
    ],
    ids=str,
)
def test_own_class_trains_like_the_stock_model(mesh: dict[str, int], twin: str, is_split: bool) -> None:
    losses, parameters = train_own({}, twin)
    held: set[str] = set()
    for found, own in run_on_ranks(2 * len(mesh), train_own, mesh, twin, {"sequence_parallel": is_split}):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in own.items():
            torch.testing.assert_close(value, parameters[name], rtol=0, atol=1e-12)
        held |= own.keys()
    assert held == parameters.keys()


def test_values_that_all_heads_share_do_not_hide_the_heads() -> None:
    # Two heads of four inputs. A feature of the value reaches one input of each head.
    queries, values = eye(2, 4).repeat_interleave(4, 1), eye(4).repeat(1, 2)
    hits = torch.cat([queries, values])
    (cut,) = find_cuts({"row": Reach(inputs=8, outputs={"column": hits})}, {"column": torch.zeros(12).bool()}, 2)
    assert (cut.blocks, cut.columns) == (2, {"column": (Part(8, "cut"), Part(4, "shared"))})


def test_inputs_that_stay_at_zero_count_as_channels() -> None:
    hits = eye(4)
    hits[1, 1] = False
    (cut,) = find_cuts({"row": Reach(inputs=4, outputs={"column": hits})}, {"column": torch.zeros(4).bool()}, 2)
    assert (cut.blocks, cut.columns) == (4, {"column": (Part(4, "cut"),)})


def test_features_that_reach_all_blocks_are_shared() -> None:
    hits = torch.cat([eye(4, 2), torch.ones(3, 4, dtype=torch.bool)])
    (cut,) = find_cuts({"row": Reach(inputs=4, outputs={"column": hits})}, {"column": torch.zeros(11).bool()}, 2)
    assert cut.blocks == 4
    assert cut.columns == {"column": (Part(8, "cut"), Part(3, "shared"))}
    assert cut.rows == ("row",)


@pytest.mark.parametrize(
    ("hits", "outside"),
    [
        (torch.ones(4, 4, dtype=torch.bool), []),
        (eye(4), [1]),
        (eye(3), []),
        (eye(4)[[0, 2, 1, 3]], []),
    ],
    ids=["joint", "used outside", "odd number of blocks", "another order"],
)
def test_what_cannot_be_cut(hits: torch.Tensor, outside: list[int]) -> None:
    used = torch.zeros(len(hits)).bool()
    used[outside] = True
    assert not [*find_cuts({"row": Reach(inputs=hits.shape[1], outputs={"column": hits})}, {"column": used}, 2)]


def test_projection_in_the_middle_is_cut_once() -> None:
    reached = {
        "second": Reach(inputs=4, outputs={"first": eye(4)}),
        "third": Reach(inputs=4, outputs={"second": eye(4)}),
    }
    none = torch.zeros(4).bool()
    (cut,) = find_cuts(reached, {"first": none, "second": none}, 2)
    assert (*cut.columns, *cut.rows) == ("first", "second")
