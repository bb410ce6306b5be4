"""Experts on several ranks compute what one process computes; what cannot is refused."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralRMSNorm

import meshtrain
from meshtrain.config.mesh import EP, MeshPlan
from meshtrain.config.plan import CompilePlan, ParallelPlan, TensorPlan
from meshtrain.config.run import CheckpointConfig, LoggingConfig, ModelConfig, RunConfig
from meshtrain.errors import ModelError, PlanError
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.account import account
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.check.experts import check_experts
from meshtrain.parallel.experts.dispatch import apply_expert_parallel
from meshtrain.parallel.experts.stacks import num_experts
from meshtrain.parallel.experts.trial import sums_weighted_results
from meshtrain.parallel.shard import _placement, sharded_dim
from meshtrain.parallel.tensor.derive import with_derived_rules
from meshtrain.runtime.mesh import init_mesh
from meshtrain.verify.shrink import shrink_mesh
from tests.parallel.test_context import BATCH, assert_proven, case_of, meta_model, problems_of
from tests.ranks import run_on_ranks
from tests.training.runs import QWEN3, VOCABULARY, build_run, steps_of, train_here


def test_experts_on_two_ranks_compute_what_one_process_does() -> None:
    two = {"ep": 2}
    assert_proven(
        [
            case_of("mixtral", two, "separate", config={"output_router_logits": True}),
            case_of("qwen3_moe", two, "padded", recompute={"mode": "selective"}),
            case_of("deepseek_v3", two, recompute={"mode": "full"}),
            case_of("mixtral", two, shard={"offload": "cpu"}, loss={"chunk_tokens": 5}),
            case_of("gpt_oss", two, attention="eager"),
        ]
    )


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}, {"cp": 2}, {"dp_replicate": 2}], ids=str)
def test_ep_beside_another_axis_computes_what_one_process_does(mesh: dict[str, int]) -> None:
    both = {"ep": 2, **mesh}
    split = {"sequence_parallel": True} if "tp" in mesh else {}
    cases = [
        case_of("mixtral", both, tensor=split),
        case_of("deepseek_v3", both, tensor=split, recompute={"mode": "full"}),
    ]
    if "tp" in mesh:
        cases.append(case_of("gpt_oss", both, attention="eager", tensor=split))
    if "pp" in mesh:
        two = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}
        cases += [case_of("gpt_oss", both, attention="eager"), case_of("qwen3_moe", both, pipeline=two)]
    if "dp_shard" in mesh:
        cases.append(case_of("mixtral", both, shard={"level": 2, "prefetch": 1}))
    if "dp_replicate" in mesh:
        cases.append(case_of("mixtral", both, shard={"reduce_gradients": "each_microbatch"}))
    assert_proven(cases)


def test_four_ranks_and_all_axes_compute_what_one_process_does() -> None:
    assert_proven([case_of("deepseek_v3", {"ep": 4}), case_of("mixtral", {"ep": 4}, "padded")])
    assert_proven([case_of("qwen3_moe", {"pp": 2, "ep": 2, "tp": 2}, tensor={"sequence_parallel": True})])
    # One expert of a rank is divided by its rows.
    assert_proven([case_of("mixtral", {"ep": 4, "dp_shard": 2}), case_of("mixtral", {"dp_shard": 8}, "padded")])
    # The ranks that hold the same experts are not neighbors.
    assert_proven([case_of("mixtral", {"dp_shard": 2, "ep": 2, "cp": 2})])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(hidden_size=8, intermediate_size=4, num_local_experts=4)
        config._experts_implementation = "eager"
        self.experts = MixtralExperts(config).double()


def train_experts_alone(chosen: list[int]) -> bool:
    """Return whether the experts of this rank get a gradient, if nothing before them trains."""
    mesh = init_mesh(MeshPlan(dp_shard=1, ep=2), "cpu")
    with torch.device("meta"):
        layer = Layer()
    apply_expert_parallel(layer, mesh)
    layer.to_empty(device="cpu")
    hidden, weights = torch.ones(6, 8).double(), torch.ones(6, 2).double()
    layer.experts(hidden, torch.tensor(chosen).expand(6, -1), weights).sum().backward()
    return all(it.grad is not None for it in layer.experts.parameters())


def compute_here(chosen: list[int], values: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the output of this rank, and the gradients of its tokens, weights and experts."""
    mesh = init_mesh(MeshPlan(dp_shard=1, ep=2), "cpu")
    rank = mesh.get_local_rank(EP)
    with torch.device("meta"):
        layer = Layer()
    apply_expert_parallel(layer, mesh)
    layer.to_empty(device="cpu")
    for name, parameter in layer.experts.named_parameters():
        local_tensor(parameter.detach()).copy_(values[name].chunk(2)[rank])
    hidden, weights = (values[name].chunk(2)[rank].requires_grad_() for name in ("hidden", "weights"))
    index = torch.tensor(chosen).expand(len(hidden), -1)
    output = layer.experts(hidden, index, weights)
    output.square().sum().backward()
    gradients = [it.grad for it in layer.experts.parameters()]
    found = [torch.zeros(2, *values[name].shape[1:]).double() for name in ("gate_up_proj", "down_proj")]
    of_experts = [zero if it is None else local_tensor(it) for zero, it in zip(found, gradients, strict=True)]
    assert hidden.grad is not None
    assert weights.grad is not None
    return output.detach(), hidden.grad, weights.grad, *of_experts


@pytest.mark.parametrize("chosen", [[0, 1], [3, 2], [1, 3]], ids=["first rank", "second rank", "one each"])
def test_ranks_without_a_token_stay_in_step(chosen: list[int]) -> None:
    stream = torch.Generator().manual_seed(0)
    layer = Layer()
    shapes = {"hidden": (6, 8), "weights": (6, 2), **{name: it.shape for name, it in layer.experts.named_parameters()}}
    values = {name: torch.randn(shape, generator=stream, dtype=torch.float64) for name, shape in shapes.items()}
    layer.experts.load_state_dict({name: values[name] for name, _ in layer.experts.named_parameters()})
    hidden, weights = values["hidden"].clone().requires_grad_(), values["weights"].clone().requires_grad_()
    output = layer.experts(hidden, torch.tensor(chosen).expand(6, -1), weights)
    output.square().sum().backward()
    wanted = [output.detach(), hidden.grad, weights.grad, *(it.grad for it in layer.experts.parameters())]
    found = [torch.cat(parts) for parts in zip(*run_on_ranks(2, compute_here, chosen, values), strict=True)]
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_ranks_without_a_token_stay_in_step_if_experts_alone_train() -> None:
    assert run_on_ranks(2, train_experts_alone, [0, 1]) == [True, False]


def test_plans_that_do_not_fit_are_refused() -> None:
    assert problems_of("llama", {"ep": 2}) == ("mesh.ep = 2: LlamaForCausalLM has no stacked experts; use ep = 1",)
    assert problems_of("mixtral", {"ep": 3}, BatchShape(6, 2, 32)) == (
        "mesh.ep = 3 does not divide the 8 experts of model.layers.*.mlp.experts; use one of 1, 2, 4, 8",
    )
    whole = TensorPlan(styles={"model.layers.*.mlp.experts": "expert_parallel"})
    plan = ParallelPlan(mesh=MeshPlan(dp_shard=1, ep=2, tp=2), tensor=whole)
    (problem,) = check_experts(plan, meta_model("mixtral"), BATCH)
    assert str(problem) == (
        "mesh.ep = 2 with tensor style 'expert_parallel': the processes of ep hold whole experts already; make it "
        "'moe_tp_experts' (`tensor.experts` = \"tensor\"), which divides each expert over tp"
    )


class SquaresWeights(MixtralExperts):
    """Experts whose results do not grow with their weights."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result: Tensor = super().forward(hidden_states, top_k_index, top_k_weights.square())
        return result


class SquaredMixtral(MixtralForCausalLM):
    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts = SquaresWeights(config)


def test_experts_that_do_not_sum_weighted_results_are_refused() -> None:
    with torch.device("meta"):
        model = SquaredMixtral(MixtralConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64))
    (problem,) = check_experts(ParallelPlan(mesh=MeshPlan(dp_shard=1, ep=2)), model, BATCH)
    assert str(problem) == (
        "mesh.ep = 2: SquaredMixtral does not sum the results of its experts by their weights; use ep = 1"
    )


def test_experts_that_round_to_float32_may_travel() -> None:
    assert sums_weighted_results(meta_model("beam"))


class ScalesResults(MixtralExperts):
    """Experts with a norm and a projection of their inputs, and a factor for each result."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, config.num_local_experts))
        self.norm = MixtralRMSNorm(config.hidden_size)
        self.before = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = top_k_weights * self.scale[top_k_index]
        result: Tensor = super().forward(self.before(self.norm(hidden_states)), top_k_index, weights)
        return result


class ScaledMixtral(MixtralForCausalLM):
    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts = ScalesResults(config)
        self.post_init()


def gradients_of_full_parameters(mesh: dict[str, int]) -> list[Tensor]:
    config = MixtralConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=2, vocab_size=64, num_local_experts=4
    )
    config._experts_implementation = "eager"
    model: Any = ScaledMixtral(config).double()
    stream = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=stream)
    if mesh:
        model = meshtrain.parallelize(model, {"mesh": mesh}, prove_unknown_class=False)
    ids = torch.randint(64, (2, 12), generator=stream)
    model(input_ids=ids, labels=ids).loss.backward()
    ends = (".scale", ".norm.weight", ".before.weight", ".before.bias", "embed_tokens.weight")
    return [
        it.full_tensor() if isinstance(it, DTensor) else it
        for it in (parameter.grad for name, parameter in model.named_parameters() if name.endswith(ends))
    ]


def test_gradients_of_all_full_parameters_of_experts_are_summed_over_tp() -> None:
    wanted = gradients_of_full_parameters({})
    # Four of each layer; the last norm and the embedding show the gradient of what experts get.
    assert len(wanted) == 10
    for found in run_on_ranks(2, gradients_of_full_parameters, {"tp": 2}):
        # Its norms compute in float32. What is summed twice, or not at all, differs by far more.
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-8)


def test_norm_in_experts_whose_gradient_no_rule_sums_is_refused() -> None:
    with torch.device("meta"):
        model = ScaledMixtral(MixtralConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64))
    plan = with_derived_rules(ParallelPlan(mesh=MeshPlan(dp_shard=1, tp=2)), model)
    styles: dict[str, Any] = {**plan.tensor.styles, "model.layers.*.mlp.experts.norm": "replicate"}
    wrong = plan.model_copy(update={"tensor": plan.tensor.model_copy(update={"styles": styles})})
    with pytest.raises(PlanError) as caught:
        resolve_plan(wrong, model, BATCH, 2)
    assert caught.value.lines == (
        "tensor.styles: model.layers.*.mlp.experts.norm is 'replicate', but inside of model.layers.*.mlp.experts "
        "('moe_tp_experts') each process works for its shards only, so its gradient must be summed; make it "
        "'replicated_with_grad_allreduce'",
    )


def test_experts_that_layers_share_are_refused() -> None:
    model = meta_model("mixtral")
    one, other = (f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2))
    model.all_tied_weights_keys[other] = one
    (problem,) = check_experts(ParallelPlan(mesh=MeshPlan(dp_shard=1, ep=2)), model, BATCH)
    assert str(problem) == f"mesh.ep = 2: several stacks of experts share {one}; use ep = 1"


def test_an_own_forward_of_experts_is_refused() -> None:
    model = meta_model("mixtral")
    stack = model.model.layers[1].mlp.experts
    stack.forward = stack.forward
    (problem,) = check_experts(ParallelPlan(mesh=MeshPlan(dp_shard=1, ep=2)), model, BATCH)
    assert str(problem) == (
        "mesh.ep = 2: the forward of model.layers.1.mlp.experts was replaced, and it would not see the experts of "
        "other processes; leave it as it is, or use ep = 1"
    )


def test_selective_recomputation_of_compiled_layers_is_refused() -> None:
    tables: dict[str, Any] = {"compile": {"enabled": True}, "recompute": {"mode": "selective"}}
    assert problems_of("mixtral", {"ep": 2}, **tables) == (
        "recompute.mode = 'selective' with compile.enabled and mesh.ep > 1: attention and MLP are then compiled "
        "separately, and torch cannot select the results to keep inside them; set recompute.mode = 'full', or "
        "compile.enabled = false",
    )


def test_parameters_that_experts_share_are_refused() -> None:
    layer = Layer()
    layer.experts.scale = nn.Parameter(torch.ones(8))
    with pytest.raises(ModelError) as caught:
        num_experts(layer.experts)
    assert caught.value.lines == (
        "scale (8,) of MixtralExperts does not belong to single experts, of which there are 4",
    )


def test_experts_take_a_quarter_on_each_of_four_ranks() -> None:
    model = meta_model("mixtral", num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_local_experts=64)
    held = {}
    for ep in (1, 4):
        plan = ParallelPlan(mesh=MeshPlan(dp_shard=1, ep=ep))
        (share,) = account(model, resolve_plan(plan, model, BatchShape(8, 2, 32), ep))
        held[ep] = share.num_local_parameters
    assert held[4] * 4 == held[1]


def test_few_experts_are_divided_without_padding() -> None:
    assert sharded_dim((8, 4096, 1024), 64) == 1
    assert sharded_dim((8, 4095, 1024), 64) == 2
    assert sharded_dim((8, 4095, 1025), 64) == 0
    assert sharded_dim((8, 4096, 1024), 64, {1}) == 2
    assert sharded_dim((128, 4096), 64) == sharded_dim((50_257, 768), 64) == sharded_dim((768,), 64) == 0
    assert sharded_dim((), 64) == 0
    model = meta_model("mixtral", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    plan = ParallelPlan(mesh=MeshPlan(dp_shard=64))
    (share,) = account(model, resolve_plan(plan, model, BatchShape(64, 1, 32), 64))
    assert share.num_local_parameters < 1.1 * sum(it.numel() for it in model.parameters()) / 64


def dimension_here() -> Shard:
    """Return what FSDP2 splits of a table whose rows tp divides unevenly."""
    mesh = init_mesh(MeshPlan(dp_shard=1, tp=2), "cpu")
    table = nn.Parameter(distribute_tensor(torch.zeros(257, 64), mesh["tp"], [Shard(0)]))
    return _placement(16, table)


def test_uneven_parts_are_split_by_the_same_dimension() -> None:
    # 129 rows would be padded to 144, and 128 are even.
    assert run_on_ranks(2, dimension_here) == [Shard(1), Shard(1)]


def test_proofs_have_every_axis() -> None:
    wide = MeshPlan(pp=4, dp_shard=8, ep=8, cp=2, tp=2)
    meshes = shrink_mesh(wide)
    assert max(it.world_size for it in meshes) == 8
    assert {axis for it in meshes for axis, degree in it.degrees.items() if degree > 1} == {
        *("pp", "dp_shard", "ep", "cp", "tp"),
    }
    assert [it.ep for it in shrink_mesh(MeshPlan(dp_shard=1, ep=8))] == [4]


def run_of(directory: Path, name: str, mesh: dict[str, int], steps: int, **tables: Any) -> RunConfig:
    # Grouped matrix products, as users have them, do not compute in float64.
    plan = ParallelPlan(mesh=MeshPlan(**{"dp_shard": 1, **mesh}), **tables)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = ModelConfig(type="qwen3_moe", config={"vocab_size": VOCABULARY, **QWEN3, **experts})
    run = build_run(directory / name, "qwen3", plan, steps=steps, checkpoint=CheckpointConfig(every=2))
    return run.model_copy(update={"model": model})


def train(config: RunConfig) -> None:
    run_on_ranks(config.plan.mesh.world_size, train_here, config, joins=False)


def test_compiled_experts_train_as_those_of_one_process(tmp_path: Path) -> None:
    compiled = CompilePlan(enabled=True, backend="aot_eager")
    train(run_of(tmp_path, "alone", {}, 3))
    train(run_of(tmp_path, "two", {"ep": 2}, 3, compile=compiled))
    wanted, found = (steps_of(tmp_path / name) for name in ("alone", "two"))
    for metric in ("loss", "grad_norm"):
        assert [it[metric] for it in found] == pytest.approx([it[metric] for it in wanted], rel=1e-5)


def test_experts_are_counted_beside_a_stage_that_has_none(tmp_path: Path) -> None:
    for name, mesh in (("alone", {}), ("two", {"pp": 2})):
        run = run_of(tmp_path, name, mesh, 2)
        model = run.model.model_copy(update={"config": {**run.model.config, "mlp_only_layers": [0, 1]}})
        logging = LoggingConfig(trackers=[], expert_tokens=True)
        train(run.model_copy(update={"model": model, "logging": logging}))
    wanted, found = (
        [
            {name: value for name, value in step.items() if name.startswith("expert_")}
            for step in steps_of(tmp_path / it)
        ]
        for it in ("alone", "two")
    )
    assert found == wanted
    each = [*itertools.product((2, 3), range(4))]
    assert {*wanted[0]} == {
        *(f"expert_tokens/model.layers.{layer}.mlp.experts/{expert}" for layer, expert in each),
        *("expert_tokens_least", "expert_tokens_most", "expert_imbalance"),
    }


def test_run_resumes_with_and_without_ep(tmp_path: Path) -> None:
    split = TensorPlan(sequence_parallel=True)
    for name, mesh, steps, tables in (
        ("alone", {}, 6, {}),
        ("traveling", {"ep": 2}, 2, {}),
        ("traveling", {"pp": 2}, 4, {}),
        ("traveling", {"ep": 2, "tp": 2}, 6, {"tensor": split}),
    ):
        run = run_of(tmp_path, name, mesh, steps, **tables)
        train(run.model_copy(update={"logging": LoggingConfig(trackers=[], expert_tokens=True)}))
    wanted, found = (steps_of(tmp_path / name) for name in ("alone", "traveling"))
    assert [it["step"] for it in found] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(wanted, found, strict=True):
        for metric in ("loss", "grad_norm"):
            assert other[metric] == pytest.approx(one[metric], rel=1e-5)
        counts = {name: value for name, value in one.items() if name.startswith("expert_")}
        assert {name: value for name, value in other.items() if name.startswith("expert_")} == counts
        stacks = [f"expert_tokens/model.layers.{layer}.mlp.experts" for layer in range(4)]
        each = [[counts[f"{stack}/{expert}"] for expert in range(4)] for stack in stacks]
        assert len(counts) == 3 + sum(map(len, each))
        assert (min(map(min, each)), max(map(max, each))) == (one["expert_tokens_least"], one["expert_tokens_most"])
        # 8 sequences of 16 tokens, 2 of 4 experts each.
        assert [*map(sum, each)] == [256] * 4
        assert one["expert_imbalance"] * 64 == one["expert_tokens_most"]
        assert one["expert_tokens_least"] <= 64 < one["expert_tokens_most"]
